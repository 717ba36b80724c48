#!/usr/bin/env python3
"""Time the exchange of expert parallelism alone, by the number of rows and by how they go, in CUDA graphs.

    torchrun --standalone --nproc-per-node 4 benchmarks/bench_exchange.py --out results.jsonl

Every rank gives M rows of bfloat16 with eight experts each, and partial rows in bfloat16. `nccl`: the transport of that
name. `flags` and `words`: transport p2p, all sizes with flags, or as words that carry their round as far as there is
room (csrc/cuda/expert_parallel). A time is a graph's of 20 calls (4 from 1024 rows on) by their number, of 15 replays
the median, of the ranks the slowest. About 10 s on four H200s.

Lines of the output: hidden, m, bytes (of a rank's rows in the dispatch), us: {how: {dispatch, combine, both, with
places}}, `with places`: ep_place, ep_dispatch and ep_combine. Results are compared, bit for bit, with those of nccl.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor

from torch_moe_ops.commands.tune.replays import replay_us
from torch_moe_ops.transports import p2p
from torch_moe_ops.transports.symmetric import prepare_buffers

TOP_K, EXPERTS = 8, 128
HIDDEN, ROWS = (2048, 7168), (1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096)
HOW = {"nccl": ("nccl", 0), "flags": ("p2p", 0), "words": ("p2p", 1 << 30)}
MOST_WORDS = 128 * 128 * 16  # bytes for which there is room


def time_of(call: Callable[[], Any], calls: int, replays: int = 15) -> float:
    """Median microseconds of a call on the slowest rank."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            call()
    times = []
    for _ in range(replays):
        times.append(replay_us(graph) / calls)  # the replay in front brings the ranks into step
    slowest = torch.tensor(statistics.median(times), device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return round(float(slowest), 2)


class Rows:
    """What a rank gives, and the three ops on it."""

    def __init__(self, hidden: int, m: int):
        g = torch.Generator("cuda").manual_seed(dist.get_rank())
        self.m, self.ranks = m, dist.get_world_size()
        self.x = torch.randn(m, hidden, device="cuda", generator=g).bfloat16()
        self.ids = torch.randint(0, EXPERTS, (m, TOP_K), device="cuda", generator=g, dtype=torch.int32)
        self.weights = torch.rand(m, TOP_K, device="cuda", generator=g)
        self.partial = torch.randn(self.ranks * m, hidden, device="cuda", generator=g).bfloat16()
        self.positions = torch.empty(0, self.ranks, dtype=torch.int32, device="cuda")
        self.table = torch.arange(EXPERTS, dtype=torch.int32, device="cuda")
        self.ones = torch.ones_like(self.table)
        self.load = torch.zeros(EXPERTS, dtype=torch.int64, device="cuda")
        self.transport = ""

    @property
    def bytes(self) -> int:
        return self.m * (self.x.shape[1] * 2 + TOP_K * 8)

    def _head(self) -> tuple[str, str, int, int]:
        return self.transport, dist.group.WORLD.group_name, self.ranks, self.m  # type: ignore[union-attr]

    def place(self) -> Tensor:
        tables = (self.table, self.ones, self.table, self.load)
        return torch.ops.moeq.ep_place(self.ids, *tables, dist.get_rank())

    def dispatch(self, ids: Tensor | None = None) -> list[Tensor]:
        given = (self.x, None, self.ids if ids is None else ids, self.weights)
        x, _, ids, weights, _ = torch.ops.moeq.ep_dispatch(*given, *self._head())
        return [x, ids, weights]

    def combine(self) -> Tensor:
        return torch.ops.moeq.ep_combine(self.partial, self.positions, self.m, *self._head(), torch.bfloat16)


def measure(rows: Rows, calls: int) -> dict[str, dict[str, float]]:
    def both() -> None:
        rows.dispatch()
        rows.combine()

    def with_places() -> None:
        rows.dispatch(rows.place())
        rows.combine()

    us: dict[str, dict[str, float]] = {}
    want: list[Tensor] = []
    for how, (rows.transport, p2p.FEW) in HOW.items():
        if how == "words" and rows.bytes + 64 > MOST_WORDS:
            continue
        got = [*rows.dispatch(), rows.combine()]
        want = want or got
        if not all(torch.equal(a, b) for a, b in zip(want, got, strict=True)):
            raise RuntimeError(f"{how} gives other bits than nccl")
        us[how] = {
            "dispatch": time_of(rows.dispatch, calls),
            "combine": time_of(rows.combine, calls),
            "both": time_of(both, calls),
            "with places": time_of(with_places, calls),
        }
    return us


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON lines")
    args = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    prepare_buffers(dist.group.WORLD, device)

    def emit(line: dict[str, Any]) -> None:
        if dist.get_rank() == 0:
            print(json.dumps(line), flush=True)
            if args.out:
                with args.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")

    emit({"gpu": torch.cuda.get_device_name(), "ranks": dist.get_world_size(), "torch": torch.__version__})
    with torch.inference_mode():
        for hidden in HIDDEN:
            for m in ROWS:
                rows = Rows(hidden, m)
                us = measure(rows, 20 if m < 1024 else 4)
                emit({"hidden": hidden, "m": m, "bytes": rows.bytes, "us": us})
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
