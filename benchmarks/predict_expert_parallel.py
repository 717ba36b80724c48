#!/usr/bin/env python3
"""Predict a layer's time over more GPUs than were measured, from what bench_expert_parallel.py measured on some.

    python benchmarks/predict_expert_parallel.py benchmarks/results/h200_x2_expert_parallel_bench.jsonl \
        --one-gpu benchmarks/results/h200_sm90_sweep.jsonl

A prediction, not a measurement: nothing here has run on 8 GPUs or several hosts. Times in microseconds, of M tokens a
rank on R ranks, hidden size H, bfloat16 rows both ways, from a run on N ranks:

    total = local + exchange
    local = one(R * M) / R * skew      one(n): measured time of all experts on one GPU with n tokens, interpolated in
                                       logarithms, beyond the largest n in proportion to n if that is 1024 or more;
                                       more tokens than the run on N ranks had are those of --one-gpu
                                       skew: local op / (one gpu / N) of N ranks with M tokens each, measured; for an M
                                       that they did not have, that of the most tokens they had
    exchange = start + bytes / rate    bytes that enter a rank each way: (R - 1) * M * 2 H; start: of the shape's
                                       exchange of fewest tokens; rate: of the exchange of most bytes of all shapes,
                                       over that of fewest tokens of the same shape, each way counted
    between hosts of 8                 transport nccl: its start and rate inside the host; what comes from other hosts,
                                       (R - 8) * M * 2 H each way, at NETWORK bytes a microsecond instead (one 400 Gb/s
                                       adapter a GPU at 90 %, an assumption), and its start once more for each doubling
                                       of hosts

efficiency = one(R * M) / R / total.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import NamedTuple

HOST = 8
NETWORK = 45_000.0  # bytes a microsecond
HIDDEN = {"qwen3_30b": 2048, "deepseek_v3": 7168, "mixtral_8x7b": 4096, "tiny": 256}
PARTIAL = "bfloat16"
SWEEP_LAYER = "cuda_sm90/nvfp4"
SWEEP_SHAPES = {"dsv3": "deepseek_v3", "qwen3_30b": "qwen3_30b", "mixtral": "mixtral_8x7b"}  # as either names them
PROPORTIONAL = 1024  # tokens on one GPU from which time grows with them


class Line(NamedTuple):
    """What start and rate a transport has: microseconds for both ways together, bytes a microsecond each way."""

    start: float
    rate: float


class Measured(NamedTuple):
    """Of one shape on some ranks, by tokens a rank."""

    shape: str
    ranks: int
    one: dict[int, float]  # tokens of one GPU -> us
    skew: dict[int, float]
    exchange: dict[str, dict[int, float]]  # transport -> M -> us

    def skew_of(self, m: int) -> float:
        return max(1.0, self.skew.get(m, self.skew[max(self.skew)]))

    @property
    def row_bytes(self) -> int:
        return 2 * HIDDEN[self.shape]


def read(path: Path) -> list[Measured]:
    found: dict[str, Measured] = {}
    for text in path.read_text().splitlines():
        line = json.loads(text)
        if "m" not in line:
            continue
        m, us, ranks = line["m"], line["us"], line["ranks"]
        of_shape = found.setdefault(line["shape"], Measured(line["shape"], ranks, {}, {}, {}))
        if ranks != of_shape.ranks:
            raise ValueError(f"{path}: lines of a shape must be of as many ranks, got {of_shape.ranks} and {ranks}")
        of_shape.one[ranks * m] = us["one gpu"]
        of_shape.skew[m] = ranks * us["local op"] / us["one gpu"]
        for what, value in us.items():
            if what.startswith("exchange, ") and what.endswith(f" {PARTIAL}"):
                of_shape.exchange.setdefault(what.split()[1], {})[m] = value
    return list(found.values())


def add_one_gpu(every: list[Measured], path: Path) -> None:
    """Adds times of more tokens than a shape has, from lines of bench_hopper_sweep.py."""
    most = {measured.shape: max(measured.one) for measured in every}
    for text in path.read_text().splitlines():
        line = json.loads(text)
        if line.get("layer") != SWEEP_LAYER:
            continue
        for measured in every:
            if SWEEP_SHAPES.get(line["shape"]) == measured.shape and line["M"] > most[measured.shape]:
                measured.one[line["M"]] = line["us"]


def one_gpu(measured: Measured, tokens: int) -> float | None:
    """Interpolated in logarithms; beyond many tokens in proportion, beyond few of them not known."""
    known = sorted(measured.one)
    if tokens >= known[-1]:
        proportional = known[-1] >= PROPORTIONAL or tokens == known[-1]
        return measured.one[known[-1]] * tokens / known[-1] if proportional else None
    if tokens <= known[0]:
        return measured.one[known[0]]
    above = next(n for n in known if n >= tokens)
    below = max(n for n in known if n <= tokens)
    if above == below:
        return measured.one[above]
    part = math.log(tokens / below) / math.log(above / below)
    return math.exp((1 - part) * math.log(measured.one[below]) + part * math.log(measured.one[above]))


def rate_of(every: list[Measured], transport: str) -> float:
    """Bytes a microsecond each way, of the shape that was measured with the most bytes."""
    most = max(every, key=lambda measured: max(measured.exchange[transport]) * measured.row_bytes)
    times = most.exchange[transport]
    few, many = min(times), max(times)
    return 2 * (most.ranks - 1) * (many - few) * most.row_bytes / (times[many] - times[few])


def lines_of(every: list[Measured], measured: Measured) -> dict[str, Line]:
    """Of each transport."""
    found = {}
    for transport, times in measured.exchange.items():
        rate, few = rate_of(every, transport), min(times)
        found[transport] = Line(times[few] - 2 * (measured.ranks - 1) * few * measured.row_bytes / rate, rate)
    return found


def exchange(measured: Measured, line: Line, ranks: int, m: int) -> float:
    of_rank = 2 * m * measured.row_bytes  # both ways
    near = (min(ranks, HOST) - 1) * of_rank / line.rate
    hosts = -(-ranks // HOST)
    if hosts == 1:
        return line.start + near
    far = (ranks - HOST) * of_rank / NETWORK
    return line.start * (1 + math.log2(hosts)) + max(near, far)


def predict(measured: Measured, line: Line, ranks: int, m: int) -> tuple[float, float] | None:
    """Microseconds, and the efficiency; None where one GPU's time is not known."""
    of_one = one_gpu(measured, ranks * m)
    if of_one is None:
        return None
    ideal = of_one / ranks
    total = ideal * measured.skew_of(m) + exchange(measured, line, ranks, m)
    return total, ideal / total


def table(every: list[Measured], measured: Measured) -> list[str]:
    lines = lines_of(every, measured)
    columns = [(t, ranks) for t in sorted(lines) for ranks in (2, 4, 8) if ranks >= measured.ranks] + [
        ("nccl", 16),
        ("nccl", 32),
    ]
    columns = [(t, ranks) for t, ranks in columns if t in lines]
    heads = [f"{t}, {ranks} ranks" + (f" ({ranks // HOST} hosts)" if ranks > HOST else "") for t, ranks in columns]
    found = [f"| {measured.shape}, M a rank | " + " | ".join(heads) + " |", "|---" * (len(columns) + 1) + "|"]
    for m in sorted({m for other in every for m in other.skew}):
        cells = [predict(measured, lines[t], ranks, m) for t, ranks in columns]
        if not any(cells):
            continue
        found.append(f"| {m} | " + " | ".join(f"{c[0]:.0f} ({c[1]:.2f})" if c else "-" for c in cells) + " |")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, help="lines of bench_expert_parallel.py")
    parser.add_argument("--one-gpu", type=Path, help="lines of bench_hopper_sweep.py on one GPU of the same kind")
    args = parser.parse_args()
    every = read(args.measured)
    if args.one_gpu:
        add_one_gpu(every, args.one_gpu)
    for measured in every:
        for transport, line in sorted(lines_of(every, measured).items()):
            print(f"{measured.shape}, {transport}: start {line.start:.1f} us, {line.rate / 1000:.0f} GB/s each way")
        print("\n".join(["", *table(every, measured), ""]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
