#!/usr/bin/env python3
"""Time moeq::route inside a CUDA graph: alone, or between a router's product and a layer.

    python benchmarks/bench_route.py --out FILE
    python benchmarks/bench_route.py --experts 128 --kernels op,triton --dtype bfloat16 --out FILE
    python benchmarks/bench_route.py --layers qwen3_30b,deepseek_v3 --kernels op,triton --ms 1,8,64,4096 --out FILE

A graph holds 20 calls on logits of their own; the time is a call's, the median over the replays. Kernels: as the op
chooses (on Hopper that of csrc/cuda/sm90/routing), or Triton's. With --layers a call is a product in bfloat16, the op,
and experts in NVFP4 on the ids (DeepSeek-V3 routed by deepseek_v3, others by renormalize); graphs of
the kernels take turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import result_lines
from bench_expert_parallel import SHAPES, Shape, random_experts
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.commands.tune.measure import graph_times
from torch_moe_ops.commands.tune.replays import replay_us
from torch_moe_ops.ops import route

CALLS, TOP_K = 20, 8
Args = argparse.Namespace
KERNELS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "op": nullcontext,
    "triton": lambda: mock.patch.object(route.sm90_router, "takes_logits", lambda *logits, **options: False),
}


def routing_of(method: str, experts: int) -> moe.Routing:
    """The method as models use it."""
    if method == "deepseek_v3":
        bias = torch.randn(experts, device="cuda") * 0.1
        return moe.Routing(method, TOP_K, bias=bias, n_group=8, topk_group=4, routed_scaling_factor=2.5)
    return moe.Routing(method, TOP_K)


def measure(routing: moe.Routing, logits: list[Tensor], rounds: int) -> list[float]:
    """Microseconds of a call, in each replay."""

    def route_all() -> None:
        for x in logits:
            moe.route(x, routing)

    route_all()
    return [us / CALLS for us in graph_times(route_all, rounds)]


def graph_of_layers(w: moe.PreparedWeights, shape: Shape, routing: moe.Routing, tokens: int) -> torch.cuda.CUDAGraph:
    """Each call with a router and hidden states of its own, so that it goes to other experts."""
    torch.manual_seed(tokens)  # the same experts whoever routes
    x = torch.randn(CALLS, tokens, shape.hidden, device="cuda", dtype=torch.bfloat16)
    gates = torch.randn(CALLS, shape.hidden, shape.experts, device="cuda", dtype=torch.bfloat16) * shape.hidden**-0.5

    def run() -> None:
        for rows, gate in zip(x, gates, strict=True):
            moe.fused_moe_routed(rows, *moe.route(rows @ gate, routing), w)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.inputs = x, gates  # type: ignore[attr-defined]  # alive as long as it is
    return graph


def measure_layers(
    w: moe.PreparedWeights, shape: Shape, method: str, tokens: int, args: Args
) -> dict[str, list[float]]:
    """Microseconds of a call by each kernel."""
    routing, graphs = routing_of(method, shape.experts), {}
    for kernel in args.kernels.split(","):
        with KERNELS[kernel]():
            graphs[kernel] = graph_of_layers(w, shape, routing, tokens)
    times: dict[str, list[float]] = {kernel: [] for kernel in graphs}
    for _ in range(args.rounds):
        for kernel, graph in graphs.items():
            times[kernel].append(replay_us(graph) / CALLS)
    return times


def line(kernel: str, times: list[float], **cell: Any) -> dict[str, Any]:
    us = {"us": statistics.median(times), "us_min": min(times)}
    return {"event": "route", "kernel": kernel, "k": TOP_K, **cell, **us}


def alone(args: Args) -> Iterator[dict[str, Any]]:
    for method in args.methods.split(","):
        routing = routing_of(method, args.experts)
        for m in map(int, args.ms.split(",")):
            logits = [torch.randn(m, args.experts, device="cuda") for _ in range(CALLS)]
            logits = [x.to(getattr(torch, args.dtype)) for x in logits]
            for kernel in args.kernels.split(","):
                with KERNELS[kernel]():
                    times = measure(routing, logits, args.rounds)
                yield line(kernel, times, method=method, E=args.experts, dtype=args.dtype, M=m)


def with_layers(args: Args) -> Iterator[dict[str, Any]]:
    for name in args.layers.split(","):
        shape, method = SHAPES[name], "deepseek_v3" if name == "deepseek_v3" else "renormalize"
        w = moe.prepare(random_experts(shape, torch.device("cuda")))
        for m in map(int, args.ms.split(",")):
            for kernel, times in measure_layers(w, shape, method, m, args).items():
                yield line(kernel, times, shape=name, method=method, M=m)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="renormalize,deepseek_v3")
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--kernels", default="op", help=f"comma list of {', '.join(KERNELS)}")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--layers", default="", help=f"comma list of {', '.join(SHAPES)}; none: routing alone")
    parser.add_argument("--ms", default="1,64,4096")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--out", type=Path, help="append the lines to this file too")
    args = parser.parse_args()
    lines = with_layers(args) if args.layers else alone(args)
    result_lines.write([result_lines.environment(), *lines], args.out)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
