#!/usr/bin/env python3
"""Shared experts inside of the routed layer's call, and beside it as a dense layer.

    python benchmarks/bench_shared_experts.py --out results.jsonl

From hidden states and router logits to the layer's result, in CUDA graphs of several calls with other inputs and two
copies of the weights in turn, so that no call finds its weights in the cache. Ways, timed in turn:

    routed              the routed experts alone, for scale
    inside              moe.with_shared_experts, moe.fused_moe
    beside_packed       routed, a layer of one expert with the same weights as the shared one, their sum
    beside_bf16         routed, a dense layer in bfloat16 of torch.mm with a compiled activation, their sum
    ..._overlapped      the same with the dense layer on a second stream

`inside` is compared with `beside_packed` before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_backward import Shape, random_layer

import torch_moe_ops as moe
from torch_moe_ops.commands.tune.replays import replay_us

COPIES = 2  # of the weights


class Model(NamedTuple):
    shape: Shape
    groups: tuple[int, int]  # n_group, topk_group
    factor: float


MODELS = {
    "dsv3": Model(Shape(256, 8, 7168, 2048), (8, 4), 2.5),
    "glm45": Model(Shape(160, 8, 5120, 1536), (0, 0), 2.5),
    "tiny": Model(Shape(8, 2, 64, 32), (4, 2), 2.5),
}
Way = Callable[[Tensor, Tensor], Tensor]


def _silu_and_mul(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


def _overlapped(routed: Way, dense: Callable[[Tensor], Tensor]) -> Way:
    """Both at once, on two streams that a graph captures."""
    side = torch.cuda.Stream()

    def run(x: Tensor, logits: Tensor) -> Tensor:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            theirs = dense(x)
        ours = routed(x, logits)
        main.wait_stream(side)
        return ours.add_(theirs)

    return run


def ways(model: Model, device: str) -> dict[str, Way]:
    """By name: router and experts of one layer, with its own copy of the weights."""
    shape = model.shape
    raw, shared = random_layer(shape, device), random_layer(shape._replace(experts=1), device)
    bias = torch.randn(shape.experts, device=device) * 0.1
    routing = moe.Routing("deepseek_v3", shape.top_k, *model.groups, model.factor, bias)
    w, packed = (moe.prepare(weights, act_format="none") for weights in (raw, shared))
    joined = moe.prepare(moe.with_shared_experts(raw, shared), act_format="none")
    w13, w2 = (m[0].to(torch.bfloat16).T for m in moe.dequantize_experts(shared))
    activate = torch.compile(_silu_and_mul, dynamic=True) if device == "cuda" else _silu_and_mul
    ids = torch.zeros(8192, 1, dtype=torch.int32, device=device)
    ones = torch.ones(8192, 1, device=device)

    def routed(x: Tensor, logits: Tensor) -> Tensor:
        return moe.fused_moe(x, logits, w, routing=routing)

    def inside(x: Tensor, logits: Tensor) -> Tensor:
        return moe.fused_moe(x, logits, joined, routing=routing)

    def dense_packed(x: Tensor) -> Tensor:
        return moe.fused_moe_routed(x, ids[: x.shape[0]], ones[: x.shape[0]], packed)

    def dense_bf16(x: Tensor) -> Tensor:
        return activate(x @ w13) @ w2

    found: dict[str, Way] = {"routed": routed, "inside": inside}
    for name, dense in (("packed", dense_packed), ("bf16", dense_bf16)):
        found[f"beside_{name}"] = lambda x, logits, dense=dense: routed(x, logits).add_(dense(x))  # type: ignore[misc]
        if device == "cuda":
            found[f"beside_{name}_overlapped"] = _overlapped(routed, dense)
    return found


def inputs_of(shape: Shape, tokens: int, calls: int, device: str) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator(device).manual_seed(tokens)
    return [
        (
            torch.randn(tokens, shape.hidden, generator=g, device=device, dtype=torch.bfloat16),
            torch.randn(tokens, shape.experts, generator=g, device=device),
        )
        for _ in range(calls)
    ]


def difference(copies: list[dict[str, Way]], shape: Shape, device: str) -> float:
    """Relative L2 of `inside` and `beside_packed`, each rounded to bfloat16 once or three times."""
    found = []
    for layer in copies:
        for x, logits in inputs_of(shape, 33, 1, device):
            mine, theirs = (layer[name](x, logits).double() for name in ("inside", "beside_packed"))
            found.append(((mine - theirs).norm() / theirs.norm()).item())
    return max(found)


def captured(way: str, copies: list[dict[str, Way]], batches: list[tuple[Tensor, Tensor]]) -> torch.cuda.CUDAGraph:
    def run() -> None:
        for i, (x, logits) in enumerate(batches):
            copies[i % len(copies)][way](x, logits)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def times(graphs: dict[str, torch.cuda.CUDAGraph], calls: int, rounds: int) -> dict[str, float]:
    """Median microseconds of a call, the ways in turn."""
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            found[name].append(replay_us(graph) / calls)
    return {name: round(statistics.median(values), 2) for name, values in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="dsv3,glm45", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--ms", default="1,8,64,1024", help="numbers of tokens")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device")
    lines = [{"event": "env", "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}]
    with torch.inference_mode():
        for name in args.models.split(","):
            model = MODELS[name]
            copies = [ways(model, "cuda") for _ in range(COPIES)]
            lines.append({"model": name, "difference": difference(copies, model.shape, "cuda")})
            print(lines[-1], flush=True)
            for tokens in map(int, args.ms.split(",")):
                calls = COPIES * (6 if tokens <= 64 else 2)
                batches = inputs_of(model.shape, tokens, calls, "cuda")
                graphs = {way: captured(way, copies, batches) for way in copies[0]}
                lines.append({"model": name, "tokens": tokens, "us": times(graphs, calls, args.rounds)})
                print(lines[-1], flush=True)
                if args.out:
                    args.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
            del copies
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
