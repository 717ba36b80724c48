#!/usr/bin/env python3
"""How far the library's backends and the field's kernels are from the oracle, on the same weights and inputs.

    bash benchmarks/peers/fetch_peers.sh          # once, where there is a network: the peers, in .peers
    python benchmarks/distances.py                # one H100 or H200, about two minutes
    python benchmarks/distances.py --activations gelu_tanh,relu2_no_mul --layers qwen3_30b,dsv3 --formats fp8,int4 \
        --out benchmarks/results/h200_distances_activations.jsonl
    python scripts/distance_table.py --write      # docs/numerics.md and what `accuracy="standard"` may choose

Writes JSON lines, --out (default: benchmarks/results/h200_distances.jsonl): relative L2 distance of a whole result
and of its worst row from the float32 result of `reference`, in the mean over calls, for every format, layer, number
of tokens and contestant. A contestant is a backend of the library ("ours"), another library's kernel ("peer"), or what
that kernel rounds in plain torch ("emulated", peer_numerics.py). One that cannot run leaves a line with the reason.
Every layer and format runs in a process of its own, several at once: a kernel that crashes ends that one alone. What
is not done after --seconds is named and left out. Peers run silu without a limit; else they are emulated.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "peers")]
os.environ.setdefault("CUDA_CACHE_MAXSIZE", str(4 << 30))  # read when CUDA starts: room for kernels shipped as PTX

import distance_cases  # noqa: E402
import torch  # noqa: E402
from distance_cases import FORMATS, LAYERS, Case  # noqa: E402

import torch_moe_ops as moe  # noqa: E402
from torch_moe_ops.core.activations import ACTIVATIONS  # noqa: E402


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "h200_distances.jsonl")
    p.add_argument("--seconds", type=float, default=150, help="nothing runs longer")
    p.add_argument("--jobs", type=int, default=12, help="processes at once")
    p.add_argument("--formats", default=",".join(FORMATS))
    p.add_argument("--layers", default=",".join(LAYERS))
    p.add_argument("--activations", default=distance_cases.PEERS_RUN, help="one after the other in each process")
    p.add_argument("--limit", type=float, help="swiglu_limit of the layers, where not the activation's own")
    p.add_argument("--more-tokens", default="", help="numbers of tokens beside the usual ones")
    p.add_argument("--ours", default="", help="backends of the library, where not all that fit")
    p.add_argument("--peers-dir", type=Path, default=Path(os.environ.get("MOE_PEERS_DIR", ".peers")))
    p.add_argument("--device", default="cuda", help="cpu: our CPU backend and the emulated peers")
    p.add_argument("--case", help=argparse.SUPPRESS)  # FORMAT:LAYER, in a process of its own
    return p


def run_case(args: argparse.Namespace) -> None:
    """The lines of one layer and format, each written when it is known."""
    peers_dir = args.peers_dir.resolve()
    sys.path.insert(0, str(peers_dir))
    with args.out.open("a", encoding="utf-8") as file, torch.inference_mode():
        case, ours = Case(*args.case.split(":")), tuple(filter(None, args.ours.split(",")))
        options = {"limit": args.limit, "more_tokens": tuple(map(int, filter(None, args.more_tokens.split(","))))}
        for activation in args.activations.split(","):
            for line in distance_cases.measure(case, peers_dir, args.device, activation, ours, **options):
                file.write(json.dumps(line) + "\n")
                file.flush()


class Job:
    """A process that measures a case, and the lines that it has written."""

    def __init__(self, case: Case, folder: Path, args: argparse.Namespace) -> None:
        self.case, self.lines_file = case, folder / f"{case.fmt}-{case.layer}.jsonl"
        self._errors = (folder / f"{case.fmt}-{case.layer}.err").open("w+", encoding="utf-8")
        options = ["--case", f"{case.fmt}:{case.layer}", "--out", str(self.lines_file), "--device", args.device]
        options += ["--activations", args.activations, "--ours", args.ours, "--more-tokens", args.more_tokens]
        options += [] if args.limit is None else ["--limit", str(args.limit)]
        command = [sys.executable, __file__, *options, "--peers-dir", str(args.peers_dir)]
        self.process = subprocess.Popen(command, stdout=self._errors, stderr=self._errors)

    def lines(self, ended: bool) -> list[dict[str, Any]]:
        """Everything known; with a line of its own where the process failed, or was `ended`."""
        text = self.lines_file.read_text("utf-8") if self.lines_file.exists() else ""
        found = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        code = self.process.returncode
        if ended or code:
            self._errors.seek(0)
            last = "" if ended else (self._errors.read().strip().splitlines() or [""])[-1]
            why = (
                "the time was over"
                if ended
                else distance_cases.without_folders(f"its process ended with {code}: {last}")
            )
            found.append({"event": "missing", "format": self.case.fmt, "layer": self.case.layer, "why": why})
        self._errors.close()
        return found


def run_all(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Every case, --jobs at once, until --seconds are over."""
    end = time.monotonic() + args.seconds
    waiting = distance_cases.cases(args.formats.split(","), args.layers.split(","))
    running: list[Job] = []
    lines: list[dict[str, Any]] = []
    while (waiting or running) and time.monotonic() < end:
        while waiting and len(running) < args.jobs:
            running.append(Job(waiting.pop(0), folder, args))
        for job in [job for job in running if job.process.poll() is not None]:
            running.remove(job)
            lines += job.lines(ended=False)
            print(f"{job.case.fmt} {job.case.layer}: done, {len(waiting)} wait", flush=True)
        time.sleep(0.1)
    for job in running:
        job.process.kill()
        job.process.wait()
        lines += job.lines(ended=True)
    lines += [{"event": "missing", "format": c.fmt, "layer": c.layer, "why": "the time was over"} for c in waiting]
    return lines


def environment(args: argparse.Namespace) -> dict[str, Any]:
    """The first line: what it ran on, which code, and how."""
    on_gpu = args.device == "cuda"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "event": "env", "date": datetime.date.today().isoformat(), "library": moe.__version__,
        "commit": commit.stdout.strip() or None, "torch": torch.__version__, "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "capability": list(torch.cuda.get_device_capability()) if on_gpu else None,
        "peers": (args.peers_dir / "MANIFEST").exists(), "calls": distance_cases.BATCHES,
    }  # fmt: skip


def main() -> int:
    args = parser().parse_args()
    if args.case:
        run_case(args)
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device; --device cpu measures the CPU backend and the emulated peers")
    for option, known in (("formats", FORMATS), ("layers", LAYERS), ("activations", ACTIVATIONS)):
        if set(getattr(args, option).split(",")) - set(known):
            raise SystemExit(f"--{option} must be of {', '.join(known)}")
    asked = [ACTIVATIONS[name] for name in args.activations.split(",")]
    without = [a.name for a in asked if "limit" not in a.takes or a.limit == args.limit]
    if args.limit is not None and without:
        raise SystemExit(f"--limit is for activations that take one besides their own, not for {', '.join(without)}")
    with tempfile.TemporaryDirectory() as folder:
        lines = [environment(args), *run_all(args, Path(folder))]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    for line in lines:
        if line["event"] == "missing":
            print(f"{line['format']} {line['layer']} {line.get('who', '')}: {line['why']}")
    print(f"{sum(line['event'] == 'distance' for line in lines)} distances in {args.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
