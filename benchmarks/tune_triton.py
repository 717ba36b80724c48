"""Time tile configurations of the Triton kernels on this GPU and print the best.

    python benchmarks/tune_triton.py --shapes qwen3_30b,dsv3 --ms 1,64,1024 --out tune.jsonl

Whole forwards are timed, in a CUDA graph over several routings: with one routing a small batch would find
its weights in L2, and a GEMM alone hides what it waits for behind its own next launch. What is worth keeping goes into
torch_moe_ops/kernels/triton/configs.py by hand: a table in the repository, so nobody's first call tunes anything.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

from bench_moe import make_call
from moe_peers import common

from torch_moe_ops.kernels.triton import launch
from torch_moe_ops.kernels.triton.configs import Config, Tile
from torch_moe_ops.ops.call import ExpertsCall

# BLOCK_N, BLOCK_K, warps, stages, register limit, parts of K (of GEMM2)
_NARROW = (
    (128, 256, 4, 3, 168), (64, 256, 4, 3), (64, 256, 4, 3, 96), (128, 128, 4, 4), (128, 128, 4, 4, 96),
    (128, 128, 8, 4), (128, 256, 4, 3), (128, 256, 4, 3, 128), (128, 256, 8, 4), (128, 256, 8, 3, 128),
    (64, 256, 4, 3, 0, 2), (64, 256, 4, 3, 0, 4), (128, 256, 4, 3, 168, 4),
)  # fmt: skip
_WIDE = (
    (128, 64, 4, 4), (128, 128, 4, 3), (128, 128, 8, 3), (256, 64, 8, 4), (256, 128, 8, 3), (128, 64, 4, 6),
)  # fmt: skip
_NARROW_PLAIN = tuple((n, k, w, s) for n, w in ((64, 4), (128, 4), (128, 8)) for k, s in ((64, 4), (64, 6), (128, 4)))
_WIDE_PLAIN = ((128, 64, 4, 4), (128, 64, 4, 3), (128, 64, 8, 4), (256, 64, 8, 3), (256, 64, 8, 4), (128, 128, 8, 3))


def candidates(fmt: str, block_t: int) -> list[Tile]:
    """Tiles worth timing for a number of tokens a tile, the likeliest first."""
    narrow, wide = (_NARROW_PLAIN, _WIDE_PLAIN) if fmt == "bf16" else (_NARROW, _WIDE)
    return [Tile(*shape) for shape in (narrow if block_t <= 32 else wide)]


def blocks(per_expert: float) -> list[tuple[int, int]]:
    """(tokens of a tile, of a nearly empty one), worth timing for this many (token, expert) pairs an expert."""
    if per_expert <= 6:
        return [(16, 16)]
    options = ((16, 16), (32, 16), (64, 16), (64, 32), (128, 32), (128, 64))
    return [o for o in options if per_expert / 2.1 <= o[0] <= per_expert * 2.1] or [(128, 32)]


class Layer:
    """One shape and number of tokens, over several routings."""

    def __init__(self, shape: common.Shape, weights: common.Weights, fmt: str, m: int):
        template = make_call(fmt, weights.as_dict(), shape.act)
        self.inputs = [common.make_inputs(shape, m, 1000 + seed) for seed in range(common.rotation(m))]
        self.calls: list[ExpertsCall] = [
            template._replace(hidden_states=i.x, topk_ids=i.ids, topk_weights=i.weights) for i in self.inputs
        ]

    def time(self, config: Config) -> float:
        """Median microseconds of a forward; infinite where the configuration does not fit the GPU."""
        outputs = [torch.empty_like(call.hidden_states) for call in self.calls]

        def run() -> None:
            for call, out in zip(self.calls, outputs, strict=True):
                launch.run_experts(call, out, config)

        try:
            run()
        except Exception:
            return float("inf")
        return graph_time(run) / len(outputs)


def graph_time(run: Any, rounds: int = 7) -> float:
    """Median microseconds of a captured run."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[rounds // 2]


def work(shapes: list[common.Shape], ms: list[int], fmt: str) -> set[tuple[common.Shape, tuple[int, int], Tile]]:
    """Everything that has to be compiled."""
    return {
        (shape, block, tile)
        for shape in shapes
        for m in ms
        for block in blocks(m * shape.k / shape.E)
        for tile in candidates(fmt, block[0])
    }


def compile_share(shapes: list[common.Shape], ms: list[int], fmt: str, share: int, shares: int) -> None:
    """Compile every shares-th configuration into Triton's cache, on few experts that have the right K and N."""
    for i, (shape, block, tile) in enumerate(sorted(work(shapes, ms, fmt), key=str)):
        if i % shares == share:
            small = common.Shape(shape.name, 2, 1, shape.H, shape.I, shape.act)
            layer = Layer(small, common.Weights.random(fmt, small), fmt, 1024)
            for rows in (16, 1) if 1 in ms and block[0] == 16 else (16,):
                call = layer.calls[0]
                part = {name: getattr(call, name)[:rows] for name in ("hidden_states", "topk_ids", "topk_weights")}
                layer.calls = [call._replace(**part)]
                layer.time(Config(*block, tile._replace(split_k=1), tile))


def tune_one(layer: Layer, fmt: str, block: tuple[int, int], out: Path, label: dict[str, Any]) -> tuple[float, Config]:
    """The best tile of GEMM2 for the likeliest of GEMM1, then of GEMM1 for that, by the time of whole forwards."""
    tiles = candidates(fmt, block[0])
    best = (float("inf"), Config(*block, tiles[0], tiles[0]))
    for which in (2, 1):
        start = best[1]
        for tile in tiles:
            if which == 1 and tile.split_k > 1:
                continue
            config = start._replace(gemm2=tile) if which == 2 else start._replace(gemm1=tile)
            us = layer.time(config)
            with out.open("a") as file:
                file.write(json.dumps(label | {"us": round(us, 2), "config": config}) + "\n")
            best = min(best, (us, config))
    return best


def tune(shapes: list[common.Shape], ms: list[int], fmt: str, out: Path, budget: float) -> None:
    """Time everything, print the best of each tokens-a-tile, append all times to `out`."""
    begin = time.monotonic()
    for shape in shapes:
        torch.manual_seed(0)
        weights = common.Weights.random(fmt, shape)
        for m in ms:
            if time.monotonic() - begin > budget:
                print("budget spent")
                return
            layer = Layer(shape, weights, fmt, m)
            floor = common.floor(shape, layer.inputs, fmt, common.Machine())["floor_us"]
            for block in blocks(m * shape.k / shape.E):
                us, config = tune_one(layer, fmt, block, out, {"shape": shape.name, "fmt": fmt, "M": m})
                tiles = f"{tuple(config.gemm1)} {tuple(config.gemm2)}"
                print(f"{shape.name} {fmt} M={m} {block}: {us:.1f} us, floor {floor:.1f}, {tiles}", flush=True)
        del weights, layer
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="qwen3_30b,dsv3,mixtral")
    parser.add_argument("--ms", default="1,8,64,256,1024,4096")
    parser.add_argument("--fmt", default="nvfp4", choices=("nvfp4", "bf16"))
    parser.add_argument("--out", type=Path, default=Path("tune.jsonl"))
    parser.add_argument("--budget", type=float, default=300, help="start nothing new after this many seconds")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="processes that compile")
    parser.add_argument("--share", type=int, default=-1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    shapes, ms = common.parse_shapes(args.shapes), [int(m) for m in args.ms.split(",")]
    if args.share >= 0:
        compile_share(shapes, ms, args.fmt, args.share, args.workers)
        return
    begin = time.monotonic()
    workers = [subprocess.Popen([sys.executable, *sys.argv, "--share", str(i)]) for i in range(args.workers)]
    for worker in workers:
        worker.wait()
    print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
    tune(shapes, ms, args.fmt, args.out, args.budget)


if __name__ == "__main__":
    main()
