"""Times the CUDA quantizer of NVFP4 activations against the copy bandwidth of the same GPU.

usage: python benchmarks/bench_quantize_cuda.py [--json FILE]

A CUDA graph of launches, rotating over inputs that together exceed the L2 cache where one does not; median of the
replays. Bytes are those that must move: the input once, codes, scales and gscale once.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from torch_moe_ops.core import extension

SHAPES = [(1, 2048), (64, 2048), (1024, 2048), (4096, 2048), (8192, 768), (16384, 7168), (131072, 7168)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
L2_BYTES = 192 << 20  # several times the largest L2 cache
REPLAYS = 15


def time_launches(launches: Sequence[Callable[[], object]]) -> float:
    """Median seconds of one launch, from replays of a graph that holds all of them."""
    for launch in launches[:2]:
        launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3 / len(launches))
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes read and written per second by a device-to-device copy of 4 GiB."""
    source = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    # Not in a graph: captured, the same copy reached 2.7 TB/s in place of 4.3 on an H200.
    times = []
    for _ in range(REPLAYS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return 2 * source.nbytes / statistics.median(times)


def bench(rows: int, columns: int, dtype: torch.dtype) -> list[dict[str, object]]:
    """Rows of the table for one shape: static scalar scale, scale per row, and the dynamic scale alone."""
    size = rows * columns * dtype.itemsize
    copies = max(1, min(64, -(-L2_BYTES // size)))
    inputs = [torch.randn(rows, columns, device="cuda", dtype=dtype) for _ in range(copies)]
    scalar, by_row = torch.tensor(500.0, device="cuda"), torch.full((rows,), 500.0, device="cuda")
    ops = torch.ops.moeq_C
    calls: dict[str, tuple[Callable[[torch.Tensor], object], int]] = {
        "quantize_nvfp4_cuda, scalar gscale": (lambda x: ops.quantize_nvfp4_cuda(x, scalar), 9),
        "quantize_nvfp4_cuda, gscale per row": (lambda x: ops.quantize_nvfp4_cuda(x, by_row), 9),
        "dynamic_gscale_nvfp4_cuda": (lambda x: ops.dynamic_gscale_nvfp4_cuda(x), 0),
    }
    table: list[dict[str, object]] = []
    for name, (call, written_per_block) in calls.items():
        launches = [functools.partial(call, x) for x in inputs] * max(1, 8 // copies)
        seconds = time_launches(launches)
        moved = size + rows * columns // 16 * written_per_block + (0 if "scalar" in name else 4 * rows)
        row = {"op": name, "rows": rows, "columns": columns, "dtype": str(dtype).removeprefix("torch.")}
        table.append({**row, "microseconds": round(seconds * 1e6, 2), "bytes": moved, "bytes_per_s": moved / seconds})
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the table there, one JSON object a line")
    arguments = parser.parse_args()
    if not extension.has_cuda_extension():
        raise SystemExit(f"nothing to time: {extension.cuda_extension_reason()}")
    copy = copy_bandwidth()
    head = {
        "command": "python benchmarks/bench_quantize_cuda.py",
        "device": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "copy_bytes_per_s": copy,
    }
    print(f"{head['device']}, torch {head['torch']}: copy {copy / 1e12:.2f} TB/s")
    lines = [json.dumps(head)]
    for rows, columns in SHAPES:
        for dtype in DTYPES:
            for row in bench(rows, columns, dtype):
                share = float(str(row["bytes_per_s"])) / copy
                lines.append(json.dumps({**row, "share_of_copy": round(share, 3)}))
                shape = f"{rows:>6} x {columns:<5} {row['dtype']:<9}"
                print(f"{row['op']:<36} {shape} {row['microseconds']:>9} us {share:6.1%}")
    if arguments.json:
        arguments.json.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
