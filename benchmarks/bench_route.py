#!/usr/bin/env python3
"""Time moeq::route inside a CUDA graph.

    python benchmarks/bench_route.py --out benchmarks/results/h200_route.jsonl

A graph holds 20 calls on logits of their own; the time is a call's, the median over the replays.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import result_lines

import torch_moe_ops as moe
from torch_moe_ops.commands.tune.measure import graph_times

CALLS = 20
EXPERTS, TOP_K = 256, 8


def routing_of(method: str) -> moe.Routing:
    """The method as models with 256 experts use it."""
    if method == "deepseek_v3":
        bias = torch.randn(EXPERTS, device="cuda") * 0.1
        return moe.Routing(method, TOP_K, bias=bias, n_group=8, topk_group=4, routed_scaling_factor=2.5)
    return moe.Routing(method, TOP_K)


def measure(method: str, tokens: int, rounds: int) -> tuple[float, float]:
    """Median and least microseconds of a call."""
    routing = routing_of(method)
    logits = [torch.randn(tokens, EXPERTS, device="cuda") for _ in range(CALLS)]

    def route_all() -> None:
        for x in logits:
            moe.route(x, routing)

    route_all()
    times = [us / CALLS for us in graph_times(route_all, rounds)]
    return statistics.median(times), min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", default="renormalize,deepseek_v3")
    parser.add_argument("--ms", default="1,64,4096")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--out", type=Path, help="append the lines to this file too")
    args = parser.parse_args()
    lines = [result_lines.environment()]
    for method in args.methods.split(","):
        for m in map(int, args.ms.split(",")):
            us, least = measure(method, m, args.rounds)
            record = {"event": "route", "method": method, "E": EXPERTS, "k": TOP_K, "M": m, "us": us, "us_min": least}
            lines.append(record)
    result_lines.write(lines, args.out)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
