#!/usr/bin/env python3
"""Time moeq::route_hidden inside a CUDA graph, beside the product and `moeq::route` that it stands for.

    python benchmarks/bench_route_hidden.py --out benchmarks/results/h200_route_hidden.jsonl

A graph holds a call for each of as many routers as 96 MB hold (at most 48), so that weights come from memory, as in a
model; the time is a call's, the median over the replays. `--plans 8x16,16x8`: the kernel divided in these ways
too (blocks of a cluster x warps). `--warm` leaves weights in the L2.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import result_lines

from torch_moe_ops.backends.sm90 import router
from torch_moe_ops.commands.tune.measure import graph_times

# experts, hidden size, top_k, method, groups
SHAPES: dict[str, tuple[int, int, int, str, tuple[int, int]]] = {
    "qwen3_30b": (128, 2048, 8, "default", (0, 0)),
    "gpt_oss_20b": (32, 2880, 4, "renormalize", (0, 0)),
    "gpt_oss_120b": (128, 2880, 4, "renormalize", (0, 0)),
    "dsv3": (256, 7168, 8, "deepseek_v3", (8, 4)),
}
MEMORY, ROUTERS = 96 << 20, 48


class Shape:
    """The routers of a shape, and ways to call one."""

    def __init__(self, name: str, warm: bool) -> None:
        experts, hidden, top_k, method, groups = SHAPES[name]
        count = 1 if warm else min(ROUTERS, MEMORY // (2 * experts * hidden))
        g = torch.Generator("cuda").manual_seed(0)
        new = lambda *size: torch.randn(*size, generator=g, device="cuda").bfloat16()  # noqa: E731
        # Logits of a standard deviation of 2: far larger ones, of which a softmax is 0, are chosen by a second pass.
        self.weights = [new(experts, hidden) * (2 * hidden**-0.5) for _ in range(count)]
        self.hidden, self.experts, self.new = hidden, experts, new
        self.bias = new(experts) if name.startswith("gpt") else None
        correction = torch.randn(experts, generator=g, device="cuda") * 0.1 if method == "deepseek_v3" else None
        self.routing = (correction, method, top_k, *groups, 1.0, True if method == "default" else None)
        self.dtype = torch.float32 if name == "dsv3" else torch.bfloat16

    def apart(self, x: Tensor, weight: Tensor) -> Any:
        """As transformers has a router, its choice by moeq::route."""
        if self.dtype == torch.float32:
            logits = torch.mm(x, weight.T, out_dtype=torch.float32)
        else:
            logits = linear(x, weight, self.bias)
        return torch.ops.moeq.route(logits, *self.routing)

    def whole(self, x: Tensor, weight: Tensor) -> Any:
        return torch.ops.moeq.route_hidden(x, weight, self.bias, *self.routing, self.dtype)

    def planned(self, plan: router.Plan) -> Callable[[Tensor, Tensor], Any]:
        def route(x: Tensor, weight: Tensor) -> Any:
            logits = torch.empty(x.shape[0], self.experts, dtype=self.dtype, device="cuda")
            return router.run(x, weight, self.bias, logits, self.routing, 0, None, plan)

        return route

    def measure(self, route: Callable[[Tensor, Tensor], Any], tokens: int, rounds: int) -> tuple[float, float]:
        """Median and least microseconds of a call."""
        x = self.new(tokens, self.hidden)
        weights = self.weights * (20 if len(self.weights) == 1 else 1)

        def route_all() -> None:
            for weight in weights:
                route(x, weight)

        route_all()
        times = [us / len(weights) for us in graph_times(route_all, rounds)]
        return statistics.median(times), min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--ms", default="1,8,16,32,64,128,256")
    parser.add_argument("--plans", default="")
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="append the lines to this file too")
    args = parser.parse_args()
    lines: list[dict[str, Any]] = [result_lines.environment()]
    for name in args.shapes.split(","):
        shape = Shape(name, args.warm)
        ways: dict[str, Any] = {"linear and route": shape.apart, "route_hidden": shape.whole}
        for plan in args.plans.split(",") if args.plans else ():
            ways[plan] = shape.planned(router.Plan(*map(int, plan.split("x"))))
        for tokens in map(int, args.ms.split(",")):
            for way, route in ways.items():
                us, least = shape.measure(route, tokens, args.rounds)
                record = {"event": "route_hidden", "shape": name, "way": way, "M": tokens}
                lines.append(record | {"us": round(us, 3), "us_min": round(least, 3)})
    result_lines.write(lines, args.out)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
