#!/usr/bin/env python3
"""Time a rank's share of a layer's experts on one GPU, by each of its kernels: what expert parallelism leaves to it.

    python benchmarks/bench_small_share.py --cells qwen3_30b/4:32,qwen3_30b/1:16 --kernels auto,decode,narrow --out FILE

A cell is SHAPE/RANKS:TOKENS, TOKENS those of all ranks together; of RANKS equal shares this one is the second (of 1 the
first). Ids are drawn over all experts. In one graph, calls take turns at routings and at copies of the weights, so that
none finds its own in the L2; kernels take turns, too. Medians of replays, microseconds a call.

Lines: shape, ranks, tokens, pairs and experts (means of what is this share's), us and least: {kernel: median or least};
with --acts, of several activation formats of the same weights, {activations/kernel: ...}.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE.parent), str(_HERE)]

import result_lines  # noqa: E402
import torch  # noqa: E402
from bench_expert_parallel import Shape, joined_codes  # noqa: E402
from torch import Tensor  # noqa: E402

import torch_moe_ops as moe  # noqa: E402
from torch_moe_ops.backends import cuda_sm90  # noqa: E402
from torch_moe_ops.backends.sm90.choice import Choice  # noqa: E402
from torch_moe_ops.commands.tune.replays import replay_us  # noqa: E402
from torch_moe_ops.core.kernel_facts import Sm90Few  # noqa: E402
from torch_moe_ops.tuning.tuned_kernels import KERNELS  # noqa: E402

NUMBERS = {name: number for number, name in enumerate(KERNELS)} | {"gathered": Sm90Few.GATHERED_KERNEL}

SHAPES = {
    "qwen3_30b": Shape(128, 8, 2048, 768),
    "qwen3_235b": Shape(128, 8, 4096, 1536),
    "qwen3_next": Shape(512, 10, 2048, 512),
    "glm_air": Shape(128, 8, 4096, 1408),
    "olmoe": Shape(64, 8, 2048, 1024),
    "kimi_linear": Shape(256, 8, 2304, 1024),
    "deepseek_v3": Shape(256, 8, 7168, 2048),
    "mixtral_8x7b": Shape(8, 2, 4096, 14336),
    "gptoss_120b": Shape(128, 4, 2880, 2880),
    "tiny": Shape(8, 2, 256, 128),
}
AT_ONCE = 1 << 28  # values that are quantized together
ENOUGH = 160 << 20  # bytes of weights that take turns


class Cell(NamedTuple):
    shape: str
    ranks: int
    tokens: int

    @classmethod
    def of(cls, text: str) -> Cell:
        head, tokens = text.split(":")
        shape, ranks = head.split("/")
        return cls(shape, int(ranks), int(tokens))


def share_of(
    shape: Shape, ranks: int, scheme: str, seed: int, acts: Sequence[str] = ("none",)
) -> dict[str, moe.PreparedWeights]:
    """Random experts of one rank, prepared as one of several, for each activation format."""
    g = torch.Generator("cuda").manual_seed(seed)
    local = shape.experts // ranks

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda", generator=g, dtype=torch.bfloat16) * 0.02

    some = max(1, AT_ONCE // (3 * shape.hidden * shape.inter))
    parts = []
    for first in range(0, local, some):
        n = min(some, local - first)
        w13, w2 = normal(n, 2 * shape.inter, shape.hidden), normal(n, shape.hidden, shape.inter)
        parts.append(moe.quantize_experts(w13, w2, scheme).tensors())
    joined = {name: joined_codes([part[name] for part in parts]) for name in parts[0]}
    raw = moe.RawWeights(scheme, activation="silu", **joined)
    first = 0 if ranks == 1 else local
    backend = "cuda_sm90_int4" if scheme in ("int4", "mxint4") else "cuda_sm90"
    share: dict[str, Any] = {"backend": backend, "num_experts": shape.experts, "local_expert_offset": first}
    return {act: moe.prepare(raw, act_format=act, **share) for act in acts}


class Routings:
    """Tokens and ids of some calls, drawn anew for each replay."""

    def __init__(self, shape: Shape, ranks: int, tokens: int, calls: int):
        self.shape, self.calls, self.local = shape, calls, shape.experts // ranks
        self.first = 0 if ranks == 1 else self.local
        self.x = torch.empty(calls, tokens, shape.hidden, device="cuda", dtype=torch.bfloat16)
        self.ids = torch.empty(calls, tokens, shape.top_k, device="cuda", dtype=torch.int32)
        self.weights = torch.empty(calls, tokens, shape.top_k, device="cuda")
        self.draw(0)

    def draw(self, seed: int) -> None:
        g = torch.Generator("cuda").manual_seed(seed)
        self.x.normal_(generator=g).mul_(0.5)
        scores = torch.rand(*self.ids.shape[:2], self.shape.experts, device="cuda", generator=g)
        weights, ids = scores.topk(self.shape.top_k)
        self.ids.copy_(ids)
        self.weights.copy_(weights / weights.sum(-1, keepdim=True))

    def work(self) -> tuple[float, float]:
        """Pairs and experts of a call that are this share's."""
        local = self.ids - self.first
        ours = [call[(call >= 0) & (call < self.local)] for call in local]
        return statistics.mean(len(c) for c in ours), statistics.mean(len(c.unique()) for c in ours)


def captured(routings: Routings, weights: list[moe.PreparedWeights], kernel: str) -> torch.cuda.CUDAGraph:
    def calls() -> None:
        for c in range(routings.calls):
            moe.fused_moe_routed(routings.x[c], routings.ids[c], routings.weights[c], weights[c % len(weights)])

    forced = Choice((NUMBERS[kernel],), (), "forced") if kernel != "auto" else None
    choose = cuda_sm90.choice_of
    with patch.object(cuda_sm90, "choice_of", choose if forced is None else lambda *_: forced):
        calls()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls()
    return graph


def time_cell(
    cell: Cell, weights: dict[str, list[moe.PreparedWeights]], kernels: list[str], replays: int, calls: int
) -> dict[str, Any]:
    shape = SHAPES[cell.shape]
    routings = Routings(shape, cell.ranks, cell.tokens, calls)
    graphs = {
        kernel if len(weights) == 1 else f"{act}/{kernel}": captured(routings, of_act, kernel)
        for act, of_act in weights.items()
        for kernel in kernels
    }
    times: dict[str, list[float]] = {kernel: [] for kernel in graphs}
    work = []
    for turn in range(replays):
        routings.draw(turn)
        work.append(routings.work())
        for kernel, graph in graphs.items():
            times[kernel].append(replay_us(graph) / calls)
    pairs, experts = (statistics.mean(values) for values in zip(*work, strict=True))
    return {
        **cell._asdict(),
        "pairs": round(pairs, 1),
        "experts": round(experts, 1),
        "us": {kernel: round(statistics.median(values), 2) for kernel, values in times.items()},
        "least": {kernel: round(min(values), 2) for kernel, values in times.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default="qwen3_30b/4:4,qwen3_30b/4:32", help="comma list of SHAPE/RANKS:TOKENS")
    parser.add_argument("--kernels", default="auto", help="comma list of auto, " + ", ".join(NUMBERS))
    parser.add_argument("--scheme", default="nvfp4", help="nvfp4, mxfp4, int4 or mxint4")
    parser.add_argument("--acts", default="none", help="comma list of activation formats: none, fp8, mxfp8, nvfp4")
    parser.add_argument("--replays", type=int, default=15, help="each with new routings for all of its calls")
    parser.add_argument("--calls", type=int, default=12, help="of a graph")
    parser.add_argument("--name", default="", help="said in each line")
    parser.add_argument("--out", type=Path, help="JSON lines are appended to this file")
    args = parser.parse_args()
    result_lines.write([result_lines.environment()], args.out)
    cells = [Cell.of(text) for text in args.cells.split(",")]
    name = {"name": args.name} if args.name else {}
    with torch.inference_mode():
        for head in dict.fromkeys((cell.shape, cell.ranks) for cell in cells):
            shape = SHAPES[head[0]]
            of_share = shape.experts // head[1] * 3 * shape.hidden * shape.inter * 9 // 16
            copies = max(1, -(-ENOUGH // of_share))
            acts = args.acts.split(",")
            shares = [share_of(shape, head[1], args.scheme, seed, acts) for seed in range(copies)]
            weights = {act: [share[act] for share in shares] for act in acts}
            for cell in cells:
                if (cell.shape, cell.ranks) == head:
                    line = time_cell(cell, weights, args.kernels.split(","), args.replays, args.calls)
                    result_lines.write([{**name, "scheme": args.scheme, **line}], args.out)
            del weights, shares
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
