#!/usr/bin/env python3
"""Predict a layer's time over more GPUs than were measured, from what bench_expert_parallel.py measured on two.

    python benchmarks/predict_expert_parallel.py benchmarks/results/h200_x2_expert_parallel_bench.jsonl

A prediction, not a measurement: nothing here has run on 4 GPUs, 8 GPUs or several hosts. Times in microseconds, of M
tokens a rank on R ranks, hidden size H, bfloat16 rows both ways:

    total = local + exchange
    local = one(R * M) / R * skew      one(n): measured time of all experts on one GPU with n tokens, interpolated in
                                       logarithms, beyond the largest n in proportion to n
                                       skew: local op / (one gpu / 2) of two ranks with M tokens each, measured
    exchange = start + bytes / rate    bytes that enter a rank each way: (R - 1) * M * 2 H; start and rate are fitted
                                       to the exchanges measured on two ranks: start from the fewest tokens, rate from
                                       the most, each way counted
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


class Line(NamedTuple):
    """What start and rate a transport has: microseconds for both ways together, bytes a microsecond each way."""

    start: float
    rate: float


class Measured(NamedTuple):
    """Of one shape on two ranks, by tokens a rank."""

    shape: str
    one: dict[int, float]  # tokens of one GPU -> us
    skew: dict[int, float]
    exchange: dict[str, dict[int, float]]  # transport -> M -> us

    @property
    def row_bytes(self) -> int:
        return 2 * HIDDEN[self.shape]


def read(path: Path) -> list[Measured]:
    found: dict[str, Measured] = {}
    for text in path.read_text().splitlines():
        line = json.loads(text)
        if "m" not in line:
            continue
        if line["ranks"] != 2:
            raise ValueError(f"{path}: lines must be of 2 ranks, got {line['ranks']}")
        of_shape = found.setdefault(line["shape"], Measured(line["shape"], {}, {}, {}))
        m, us = line["m"], line["us"]
        of_shape.one[2 * m] = us["one gpu"]
        of_shape.skew[m] = 2 * us["local op"] / us["one gpu"]
        for what, value in us.items():
            if what.startswith("exchange, ") and what.endswith(f" {PARTIAL}"):
                of_shape.exchange.setdefault(what.split()[1], {})[m] = value
    return list(found.values())


def one_gpu(measured: Measured, tokens: int) -> float:
    """Interpolated in logarithms; beyond what was measured in proportion."""
    known = sorted(measured.one)
    if tokens >= known[-1]:
        return measured.one[known[-1]] * tokens / known[-1]
    if tokens <= known[0]:
        return measured.one[known[0]]
    above = next(n for n in known if n >= tokens)
    below = max(n for n in known if n <= tokens)
    if above == below:
        return measured.one[above]
    part = math.log(tokens / below) / math.log(above / below)
    return math.exp((1 - part) * math.log(measured.one[below]) + part * math.log(measured.one[above]))


def line_of(measured: Measured, transport: str) -> Line:
    times = measured.exchange[transport]
    few, many = min(times), max(times)
    rate = 2 * (many - few) * measured.row_bytes / (times[many] - times[few])
    return Line(times[few] - 2 * few * measured.row_bytes / rate, rate)


def exchange(measured: Measured, transport: str, ranks: int, m: int) -> float:
    line = line_of(measured, transport)
    of_rank = 2 * m * measured.row_bytes  # both ways
    near = (min(ranks, HOST) - 1) * of_rank / line.rate
    hosts = -(-ranks // HOST)
    if hosts == 1:
        return line.start + near
    far = (ranks - HOST) * of_rank / NETWORK
    return line.start * (1 + math.log2(hosts)) + max(near, far)


def predict(measured: Measured, transport: str, ranks: int, m: int) -> tuple[float, float]:
    """Microseconds, and the efficiency."""
    ideal = one_gpu(measured, ranks * m) / ranks
    total = ideal * max(1.0, measured.skew[m]) + exchange(measured, transport, ranks, m)
    return total, ideal / total


def table(measured: Measured) -> list[str]:
    columns = [(t, ranks) for t in sorted(measured.exchange) for ranks in (2, 4, 8)] + [("nccl", 16), ("nccl", 32)]
    columns = [(t, ranks) for t, ranks in columns if t in measured.exchange]
    heads = [f"{t}, {ranks} ranks" + (f" ({ranks // HOST} hosts)" if ranks > HOST else "") for t, ranks in columns]
    lines = [f"| {measured.shape}, M a rank | " + " | ".join(heads) + " |", "|---" * (len(columns) + 1) + "|"]
    for m in sorted(measured.skew):
        cells = (predict(measured, t, ranks, m) for t, ranks in columns)
        lines.append(f"| {m} | " + " | ".join(f"{us:.0f} ({eff:.2f})" for us, eff in cells) + " |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, help="lines of bench_expert_parallel.py on two ranks")
    args = parser.parse_args()
    for measured in read(args.measured):
        for transport in sorted(measured.exchange):
            line = line_of(measured, transport)
            print(f"{measured.shape}, {transport}: start {line.start:.1f} us, {line.rate / 1000:.0f} GB/s each way")
        print("\n".join(["", *table(measured), ""]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
