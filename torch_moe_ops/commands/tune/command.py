"""`python -m torch_moe_ops tune`: tile sizes of the Triton kernels, or the kernels of `cuda_sm90`."""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torch_moe_ops.backends import cuda_sm90
from torch_moe_ops.backends.sm90 import byte_formats
from torch_moe_ops.backends.sm90.common import CAPABILITY, MAX_EXPERTS
from torch_moe_ops.backends.sm90.formats import size_multiple
from torch_moe_ops.backends.triton import device_reason, package_reason
from torch_moe_ops.checkpoints import CheckpointError
from torch_moe_ops.commands.tune import layers
from torch_moe_ops.commands.tune.layers import Layer
from torch_moe_ops.core import extension
from torch_moe_ops.core.schemes import SCHEMES
from torch_moe_ops.tuning import tuned, tuned_kernels

TOKENS_OF_KERNELS = "1,4,8,12,16,20,24,32,40,48,56,64,80,96,128,192,256,384,512,768,1024,1536,2048,3072"
TOKENS = "1,2,4,8,16,32,64,128,256,512,1024,2048,4096"
# Part of the time that may go to compiling ahead; what is left compiles as it is timed.
_COMPILE_SHARE = 0.5


def add_parser(commands: Any) -> None:
    """The subcommand and its options."""
    parser = commands.add_parser(
        "tune",
        help="time tile sizes, or which kernel is best for how many tokens, on this GPU and keep the best",
        description="Time tile sizes of the Triton kernels on this GPU, or the kernels of the backend cuda_sm90; later "
        "runs of the library use the best ones. "
        f"They are kept in ${tuned.ENVIRONMENT_VARIABLE}, else in ~/.cache/torch_moe_ops/tune.",
    )
    parser.add_argument("--backend", choices=("triton", "cuda_sm90"), default="triton", help="whose kernels")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--shapes", help=f"comma list of {', '.join(layers.SHAPES)}, experts:top_k:hidden:intermediate")
    what.add_argument("--checkpoint", help="folder with safetensors: sizes, scheme and activation of its experts")
    parser.add_argument("--layer", type=int, help="of the checkpoint; default: the first with experts")
    parser.add_argument("--top-k", type=int, help="experts a token, where the checkpoint's config.json does not say it")
    parser.add_argument("--scheme", default=None, help="with --shapes: comma list of schemes (default: nvfp4)")
    parser.add_argument("--act-format", default=None, help="comma list; default: the scheme's own")
    parser.add_argument("--tokens", help=f"numbers of tokens (default: {TOKENS}; those near bounds for cuda_sm90)")
    parser.add_argument("--max-minutes", type=float, default=10.0, help="in all; what is complete by then is kept")
    parser.add_argument("--workers", type=int, default=0, help="processes that compile; 0: most of the cores")
    parser.set_defaults(command_function=main)


def layers_of(options: argparse.Namespace) -> list[Layer]:
    """What is asked for. ValueError or CheckpointError says what is wrong."""
    acts = options.act_format.split(",") if options.act_format else [None]
    if options.checkpoint:
        if options.scheme:
            raise ValueError("--scheme: must be left out with --checkpoint, whose tensors say it")
        found = [layers.of_checkpoint(options.checkpoint, options.layer, options.top_k, act) for act in acts]
    else:
        for name in ("layer", "top_k"):
            if getattr(options, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')}: must be left out without --checkpoint")
        found = []
        for scheme in (options.scheme or "nvfp4").split(","):
            if scheme not in SCHEMES:
                raise ValueError(f"--scheme: must be one of {', '.join(SCHEMES)}, got {scheme!r}")
            for shape in (options.shapes or "qwen3_30b").split(","):
                found += [layers.of_shape(shape, scheme, act or layers.default_act(scheme)) for act in acts]
    for layer in found:
        layers.check(layer)
        if options.backend == "cuda_sm90":
            _check_for_sm90(layer)
    return found


def _check_for_sm90(layer: Layer) -> None:
    """ValueError where `cuda_sm90` does not run the layer."""
    raw = layer.raw
    if layer.act_format not in cuda_sm90.FORMATS.get(raw.scheme, ()):
        known = ", ".join(f"{scheme} with {act}" for scheme, acts in cuda_sm90.FORMATS.items() for act in acts)
        raise ValueError(f"--backend: cuda_sm90 must be for one of {known}, got {raw.scheme} with {layer.act_format}")
    if raw.hidden_size % (multiple := size_multiple(raw.scheme)):
        raise ValueError(f"{layer.name}: hidden_size must be a multiple of {multiple}, got {raw.hidden_size}")
    if raw.scheme == "int8" and (reason := byte_formats.int8_reason(byte_formats.int8_scales_of(raw))) is not None:
        raise ValueError(f"{layer.name}: {reason}")
    if raw.num_experts > MAX_EXPERTS:
        raise ValueError(f"{layer.name}: num_experts must be at most {MAX_EXPERTS}, got {raw.num_experts}")


def tokens_of(text: str) -> list[int]:
    """Ascending numbers of tokens; ValueError where one is not a positive number."""
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"--tokens: must be a comma list of positive numbers, got {text!r}")
    return sorted({int(part) for part in parts})


def _reason(backend: str) -> str | None:
    """Why nothing can be tuned here, or None."""
    if backend == "triton" and (reason := package_reason()):
        return reason
    if not torch.cuda.is_available():
        return "a CUDA device must be visible, got none"
    if reason := tuned.no_folder_reason():
        return reason
    capability = torch.cuda.get_device_capability()
    if backend == "triton":
        return device_reason("cuda", capability)
    if capability != CAPABILITY:
        return f"compute capability must be {CAPABILITY}, got {capability}"
    return extension.cuda_extension_reason() or None


def main(options: argparse.Namespace) -> int:
    """Exit status: 0, 1 where the time ended first, 2 where the arguments or the machine do not fit."""
    try:
        wanted = layers_of(options)
        tokens = tokens_of(options.tokens or (TOKENS if options.backend == "triton" else TOKENS_OF_KERNELS))
        if not 0 < options.max_minutes < float("inf"):
            raise ValueError(f"--max-minutes: must be a positive number, got {options.max_minutes}")
        if reason := _reason(options.backend):
            raise ValueError(reason)
    except (ValueError, CheckpointError) as error:
        print(f"tune: {error}", file=sys.stderr)
        return 2
    tiles = functools.partial(_tune_tiles, workers=options.workers)
    tune: Callable[..., Path | None] = tiles if options.backend == "triton" else _tune_kernels
    return _run(wanted, tokens, time.time() + 60 * options.max_minutes, tune)


class Progress:
    """A bar on stderr, or a line now and then where tqdm is not installed."""

    def __init__(self, total: int, what: str):
        self._total, self._what, self._done = total, what, 0
        self._bar: Any = None
        try:
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=what, file=sys.stderr, leave=False)
        except ImportError:
            print(f"{what}: {total} steps", file=sys.stderr, flush=True)

    def advance(self, steps: int = 1) -> None:
        self._done += steps
        if self._bar is not None:
            self._bar.update(steps)
        elif self._done * 10 // self._total > (self._done - steps) * 10 // self._total:
            print(f"{self._what}: {self._done} of {self._total}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _run(wanted: list[Layer], tokens: list[int], deadline: float, tune: Callable[..., Path | None]) -> int:
    name, where = torch.cuda.get_device_name(), tuned.folder()
    assert where is not None
    path: Path | None = None
    for i, layer in enumerate(wanted):
        # Each layer may take an even share of the time that is left.
        until = time.time() + (deadline - time.time()) / (len(wanted) - i)
        path = tune(layer, tokens, until, name, where) or path
    if path is not None:
        print(f"written: {path}")
    if time.time() >= deadline:
        print("tune: the time ended before everything was timed; what is complete was kept", file=sys.stderr)
        return 1
    return 0


def _tune_kernels(layer: Layer, tokens: list[int], deadline: float, device_name: str, where: Path) -> Path | None:
    """Time the kernels of `cuda_sm90` on one layer. None where the time ended first."""
    from torch_moe_ops.commands.tune import kernels

    print(f"{layer.name} {layer.key.scheme} {layer.key.act_format}: {len(tokens)} numbers of tokens", flush=True)
    weights = kernels.in_tiles(layer, torch.device("cuda"))
    times: dict[int, dict[str, float]] = {}
    for t in tokens:
        if time.time() > deadline:
            return None
        times[t] = kernels.time_kernels(layer, weights, t, kernels.candidates(t, layer, times))
        print(f"  {t:>5} tokens: " + ", ".join(f"{name} {us:.1f}" for name, us in times[t].items()), flush=True)
    switches = kernels.switches_of(times, kernels.rules_of(layer))
    print(f"  {switches}, by rules {kernels.rules_of(layer)}", flush=True)
    return tuned_kernels.save(device_name, layer.key, switches, where / tuned_kernels.FOLDER)


def _tune_tiles(
    layer: Layer, tokens: list[int], deadline: float, device_name: str, where: Path, workers: int
) -> Path | None:
    """Tune one layer for all numbers of tokens, keeping each as it is found. None where nothing was."""
    from torch_moe_ops.commands.tune import measure
    from torch_moe_ops.commands.tune.search import plan, search

    key = layer.key
    sizes = [(t, key.top_k, key.num_experts) for t in tokens]
    trials = sum(len(plan(measure.rules_of(layer, t), layer.bits, *s)) for t, s in zip(tokens, sizes, strict=True))
    print(f"{layer.name} {key.scheme} {key.act_format}: {len(tokens)} numbers of tokens", flush=True)
    progress = Progress(trials, "compile")
    until = time.time() + _COMPILE_SHARE * (deadline - time.time())
    measure.compile_ahead(layer, tokens, workers or measure.default_workers(), until, progress.advance)
    progress.close()
    weights = layers.random_call(layer, torch.device("cuda"))
    progress = Progress(2 * trials, "time")
    path = None
    for t, size in zip(tokens, sizes, strict=True):
        if time.time() > deadline:
            break
        try:
            trial = measure.Trial(layer, weights, t)
        except measure.FAILURES as error:
            print(f"tune: {layer.name} with {t} tokens does not run here: {error}", file=sys.stderr)
            break
        timed = _counted(trial.time, progress)
        found = search(timed, measure.rules_of(layer, t), layer.bits, size, lambda: time.time() > deadline)
        if found is None:
            break
        config = ((found.config.block_t, found.config.tail_t), tuple(found.config.gemm1), tuple(found.config.gemm2))
        path = tuned.save(device_name, key, [tuned.Entry(t, round(found.us, 2), config)], where)
        failed = ", ".join(f"{count} {why}" for why, count in trial.failures.items())
        print(
            f"  {t:>5} tokens: {found.us:.1f} us (rules {found.rules_us:.1f}) {config}"
            f"{f', dropped: {failed}' if failed else ''}",
            flush=True,
        )
    progress.close()
    return path


def _counted(timed: Callable[[Any], float], progress: Progress) -> Callable[[Any], float]:
    def trial(config: Any) -> float:
        us = timed(config)
        progress.advance()
        return us

    return trial
