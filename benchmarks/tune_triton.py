"""Time tile configurations of the Triton kernels on this GPU and print the best of each GEMM.

    python benchmarks/tune_triton.py --shapes qwen3_30b,dsv3 --ms 1,64,1024 --out tune.jsonl

Each GEMM is timed alone in a CUDA graph over several routings, as a decode step would find its weights in
memory and not in L2. What is worth keeping goes into torch_moe_ops/kernels/triton/configs.py by hand: a
table in the repository, so nobody's first call tunes anything.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

from bench_moe import make_call  # noqa: E402
from moe_peers import common  # noqa: E402

from torch_moe_ops.kernels.triton import launch  # noqa: E402
from torch_moe_ops.kernels.triton.configs import Config, Tile  # noqa: E402
from torch_moe_ops.ops.call import ExpertsCall  # noqa: E402


def candidates(fmt: str, block_t: int) -> list[Tile]:
    """Tiles worth timing for a number of tokens a tile."""
    if fmt == "bf16":
        if block_t <= 32:
            return [Tile(n, k, w, s) for n, w in ((64, 4), (128, 4), (128, 8)) for k, s in ((64, 4), (64, 6), (128, 4))]
        return [Tile(n, 64, 8, s) for n in (128, 256) for s in (3, 4)] + [Tile(128, 64, 4, 3), Tile(64, 64, 4, 4)]
    if block_t <= 32:
        shapes = [(64, 128, 4, 4), (64, 256, 4, 3), (128, 128, 4, 4), (128, 128, 4, 5), (128, 128, 8, 4), (128, 128, 8, 6)]
        shapes += [(128, 256, 4, 3), (128, 256, 4, 4), (128, 256, 8, 3), (128, 256, 8, 4), (128, 128, 4, 4, 128)]
        return [Tile(*s) for s in (*shapes, (128, 256, 4, 3, 168))]
    shapes = [(128, 128, 4, 3), (128, 64, 4, 4), (128, 64, 4, 6), (128, 128, 8, 3), (128, 128, 8, 4)]
    shapes += [(256, 64, 8, 4), (256, 64, 8, 6), (256, 128, 8, 3), (256, 128, 8, 4), (64, 128, 4, 3)]
    return [Tile(*s) for s in shapes]


def block_ts(m: int, per_expert: float) -> list[int]:
    """Tokens a tile, worth timing for m tokens and this many (token, expert) pairs an expert."""
    if per_expert <= 6:
        return [16]
    options = [t for t in (16, 32, 64, 128) if per_expert / 2.1 <= t <= per_expert * 2.1]
    return options or [128]


class Gemms:
    """Both GEMMs of one shape and number of tokens, each with buffers of its own for every routing."""

    def __init__(self, shape: common.Shape, weights: common.Weights, fmt: str, m: int):
        template = make_call(fmt, weights.as_dict(), shape.act)
        self.calls: list[ExpertsCall] = []
        self.inputs = [common.make_inputs(shape, m, 1000 + seed) for seed in range(common.rotation(m))]
        for inputs in self.inputs:
            self.calls.append(
                template._replace(hidden_states=inputs.x, topk_ids=inputs.ids, topk_weights=inputs.weights)
            )

    def time(self, which: int, block_t: int, tile: Tile) -> float:
        """Median microseconds of one GEMM."""
        config = Config(block_t, tile, tile)
        prepared = []
        for call in self.calls:
            plan = launch._plan(call, config)
            buffers = launch._buffers(call, plan)
            buffers.h.normal_()
            launch._run_prologue(call, plan, buffers)
            prepared.append((call, plan, buffers))

        def run() -> None:
            for call, plan, buffers in prepared:
                if which == 1:
                    launch._run_gemm1(call, plan, buffers, buffers.h, False)
                else:
                    launch._run_gemm2(call, plan, buffers, False)

        run()
        return graph_time(run) / len(prepared)

    def time_forward(self, config: Config) -> float:
        """Median microseconds of a whole forward."""
        outputs = [torch.empty_like(call.hidden_states) for call in self.calls]

        def run() -> None:
            for call, out in zip(self.calls, outputs, strict=True):
                launch.run_experts(call, out, config)

        run()
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


def work(shapes: list[common.Shape], ms: list[int], fmt: str) -> Iterator[tuple[common.Shape, int, int, Tile]]:
    """(shape, M, block_t, tile) of everything to time."""
    for shape in shapes:
        for m in ms:
            for block_t in block_ts(m, m * shape.k / shape.E):
                for tile in candidates(fmt, block_t):
                    yield shape, m, block_t, tile


def compile_share(shapes: list[common.Shape], ms: list[int], fmt: str, share: int, shares: int) -> None:
    """Compile every shares-th configuration into Triton's cache, on tiny weights that have the right K and N."""
    seen = set()
    for shape, m, block_t, tile in work(shapes, ms, fmt):
        seen.add((shape, block_t, tile))
    for i, (shape, block_t, tile) in enumerate(sorted(seen, key=str)):
        if i % shares != share:
            continue
        small = common.Shape(shape.name, 2, 1, shape.H, shape.I, shape.act)
        call = Gemms(small, common.Weights.random(fmt, small), fmt, 2000).calls[0]
        rows = {name: getattr(call, name)[:16] for name in ("hidden_states", "topk_ids", "topk_weights")}
        call = call._replace(**rows)
        try:
            launch.run_experts(call, torch.empty_like(call.hidden_states), Config(block_t, tile, tile))
        except Exception as error:  # noqa: BLE001  a tile that does not fit is left out again when it is timed
            print(f"{shape.name} {block_t} {tile}: {str(error)[:100]}", file=sys.stderr)


def tune(shapes: list[common.Shape], ms: list[int], fmt: str, out: Path, budget: float) -> None:
    """Time everything, print the best three of each GEMM, append all times to `out`."""
    begin = time.monotonic()
    for shape in shapes:
        torch.manual_seed(0)
        weights = common.Weights.random(fmt, shape)
        for m in ms:
            if time.monotonic() - begin > budget:
                print("budget spent")
                return
            gemms = Gemms(shape, weights, fmt, m)
            by_block: dict[int, dict[int, tuple[float, tuple[int, ...]]]] = {}
            for which in (1, 2):
                results = []
                for block_t in block_ts(m, m * shape.k / shape.E):
                    for tile in candidates(fmt, block_t):
                        try:
                            us = gemms.time(which, block_t, tile)
                        except Exception:  # noqa: BLE001  does not fit this GPU
                            continue
                        results.append((us, block_t, tuple(tile)))
                results.sort()
                with out.open("a") as file:
                    for us, block_t, tile in results:
                        record = {"shape": shape.name, "fmt": fmt, "M": m, "gemm": which, "us": round(us, 2)}
                        file.write(json.dumps(record | {"block_t": block_t, "tile": tile}) + "\n")
                best: dict[int, list[str]] = {}
                for us, block_t, tile in results:
                    best.setdefault(block_t, []).append(f"{us:.1f} {tile}")
                    by_block.setdefault(block_t, {}).setdefault(which, (us, tile))
                for block_t, lines in best.items():
                    print(f"{shape.name} {fmt} M={m} gemm{which} T={block_t}: " + " | ".join(lines[:4]), flush=True)
            for block_t, tiles in by_block.items():
                if len(tiles) == 2:
                    config = Config(block_t, Tile(*tiles[1][1]), Tile(*tiles[2][1]))
                    us = gemms.time_forward(config)
                    floor = common.floor(shape, gemms.inputs, fmt, common.Machine())["floor_us"]
                    print(
                        f"{shape.name} {fmt} M={m} T={block_t}: forward {us:.1f} us, floor {floor:.1f}, "
                        f"GEMMs {tiles[1][0]:.1f} + {tiles[2][0]:.1f}",
                        flush=True,
                    )
        del weights, gemms
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
