"""`python -m torch_moe_ops inspect PATH`, `tune` and `doctor`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from torch_moe_ops.checkpoints import CheckpointError
from torch_moe_ops.commands.inspect import Inspection


def _parser() -> argparse.ArgumentParser:
    from torch_moe_ops.commands.tune import command

    parser = argparse.ArgumentParser(prog="python -m torch_moe_ops")
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="what a checkpoint holds and what can run it")
    inspect.add_argument(
        "path", help="folder with safetensors, one .safetensors file, or org/name on the Hugging Face Hub"
    )
    inspect.add_argument("--layer", type=int, help="only this layer")
    inspect.add_argument("--quick", action="store_true", help="headers and first experts only: no check of all scales")
    inspect.add_argument("--no-backends", action="store_true", help="leave out what can run it")
    inspect.set_defaults(command_function=_inspect)
    command.add_parser(commands)
    doctor = commands.add_parser("doctor", help="what is installed, compiled and usable here, and why the rest is not")
    doctor.set_defaults(command_function=_doctor)
    return parser


def _doctor(options: argparse.Namespace) -> int:
    """Exit status 0: that something is absent is no failure."""
    from torch_moe_ops.commands.doctor import report

    for line in report():
        print(line, flush=True)
    return 0


def _inspect(options: argparse.Namespace) -> int:
    """Exit status: 0, 1 where a layer has a problem, 2 where the checkpoint cannot be opened."""
    try:
        found = Inspection(options.path, options.layer, quick=options.quick, backends=not options.no_backends)
    except CheckpointError as error:
        print(f"problem: {error}", file=sys.stderr)
        return 2
    for line in found.lines():
        print(line, flush=True)
    return 1 if found.problems else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status of the command: see `_inspect` and `tune.command.main`."""
    options = _parser().parse_args(arguments)
    return options.command_function(options)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # what read the output has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python says so when it flushes
        sys.exit(1)
