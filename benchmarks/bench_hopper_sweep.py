#!/usr/bin/env python3
"""Sweep the number of tokens on a Hopper GPU: cliffs of `cuda_sm90`, and where it loses to `triton`.

    python benchmarks/bench_hopper_sweep.py --shapes qwen3_30b,dsv3,mixtral --fmts nvfp4 --out sweep.jsonl

A cliff is a larger M that is faster than a smaller one by more than 10 %; a loss is more than 3 % behind `triton`.
Medians of CUDA graph replays over rotating routings, the layers taking turns (peers/README.md has the protocol).
Exit status 1 where there is a cliff or a loss.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE.parent), str(_HERE), str(_HERE / "peers")]

import moe_layers  # noqa: E402
import result_lines  # noqa: E402
from moe_peers import common, runner, timing  # noqa: E402
from torch import Tensor  # noqa: E402

import torch_moe_ops as moe  # noqa: E402

OURS, OTHER = "cuda_sm90", "triton"
CLIFF, LOSS = 1.10, 1.03
MS = "1,2,3,4,6,8,12,16,24,32,48,64,96,128,192,256,384,512,768,1024,1536,2048,3072,4096,6144,8192,12288,16384"


class FromLogits(runner.UnderTest):
    """A layer from router logits: the monolithic op."""

    def __init__(self, layer: moe_layers.OurLayer, top_k: int):
        w, routing = layer.prepared, moe.Routing("renormalize", top_k)

        def forward(x: Tensor, logits: Tensor) -> Tensor:
            return moe.fused_moe(x, logits, w, routing=routing)

        super().__init__(layer.label, layer.fmt, forward, True)


def entries(fmts: list[str], logits: bool) -> list[runner.Entry]:
    """cuda_sm90 and triton; from router logits where asked."""
    found = []
    for entry in moe_layers.entries([OURS, OTHER], fmts):

        def build(fmt: str, weights: Any, context: Any, entry: Any = entry) -> list[Any]:
            layers = entry.build(fmt, weights, context)
            return [FromLogits(layer, weights.shape.k) for layer in layers] if logits else layers

        found.append(runner.Entry(entry.name, entry.fmt, build))
    return found


def findings(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cliffs and losses of one shape and format. records: of bench events, any order."""
    mine = sorted((r for r in records if r["layer"].startswith(f"{OURS}/")), key=lambda r: r["M"])
    other = {r["M"]: r["us"] for r in records if r["layer"].startswith(f"{OTHER}/")}
    found = []
    for at, small in enumerate(mine):
        later = min(mine[at:], key=lambda r: r["us"])
        if later["us"] * CLIFF < small["us"]:
            found.append({"event": "cliff", "M": small["M"], "us": small["us"], "M2": later["M"], "us2": later["us"]})
        theirs = other.get(small["M"])
        if theirs is not None and small["us"] > LOSS * theirs:
            found.append({"event": "loss", "M": small["M"], "us": small["us"], "triton_us": theirs})
    return found


def report(sink: common.Sink) -> int:
    """Emit the findings of every shape and format. Returns their number."""
    bench = sink.of("bench")
    count = 0
    for shape, fmt in dict.fromkeys((r["shape"], r["layer"].split("/")[1]) for r in bench):
        for finding in findings([r for r in bench if r["shape"] == shape and r["layer"].endswith(f"/{fmt}")]):
            sink.emit(**finding, shape=shape, fmt=fmt)
            count += 1
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="qwen3_30b,dsv3,mixtral")
    parser.add_argument("--fmts", default="nvfp4", help="nvfp4 (W4A16), nvfp4-a4")
    parser.add_argument("--ms", default=MS)
    parser.add_argument("--logits", action="store_true", help="from router logits, which route in the same call")
    parser.add_argument("--reps", type=int, default=15)
    parser.add_argument("--sets", type=int, default=0, help="routings that take turns; 0: the protocol's own number")
    parser.add_argument("--warm", type=float, default=0.3, help="seconds of replays before those that count")
    parser.add_argument("--check", action="store_true", help="check results on a tiny layer first")
    parser.add_argument("--budget", type=float, default=0, help="seconds after which nothing new is begun")
    parser.add_argument("--out", help="JSON lines are appended to this file")
    parser.add_argument("--read", help="only report the findings of such a file")
    args = parser.parse_args()
    if args.read:
        sink = common.Sink()
        sink.records = [json.loads(line) for line in Path(args.read).read_text().splitlines()]
        return 1 if report(sink) else 0
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: --read works without one")
    sink = common.Sink(args.out)
    sink.emit(**result_lines.environment())
    shapes, ms = common.parse_shapes(args.shapes), [int(m) for m in args.ms.split(",")]
    layers = entries(args.fmts.split(","), args.logits)
    context = runner.Context(Path("."))
    timing.measure = functools.partial(timing.measure, warm_s=args.warm)
    with torch.inference_mode():
        options: dict[str, Any] = {"reps": args.reps, "sets": args.sets, "checks": args.check, "budget": args.budget}
        alive = runner.run(shapes, ms, layers, context, sink, **options)
    count = report(sink)
    print(runner.tables(sink), flush=True)
    return 0 if alive and not count and all(check["ok"] for check in sink.of("check")) else 1


if __name__ == "__main__":
    raise SystemExit(main())
