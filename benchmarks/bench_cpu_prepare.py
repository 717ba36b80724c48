#!/usr/bin/env python3
"""Time and memory of preparing one layer for the CPU's kernels.

    python benchmarks/bench_cpu_prepare.py --json FILE  # DeepSeek-V3's layer in NVFP4: 6.3 GB, and as much again
    python benchmarks/bench_cpu_prepare.py --experts 32 --schemes nvfp4 fp8_block

"seconds" pass between the call of `moe.prepare` and its return; "growth" is the largest growth of anonymous memory
meanwhile over the bytes of the raw layer: 1 is the prepared layer itself. What comes on top is held for as long as the
call takes.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from bench_cpu import processor
from peak_memory import Peak

import torch_moe_ops as moe

GROUP = 32  # of int4


def random_codes(*shape: int) -> torch.Tensor:
    """Bytes that are all written, because memory that is not counts as none; any byte is two codes of 4 bits."""
    return torch.randint(0, 127, (*shape[:1], 1, 1), dtype=torch.uint8).expand(shape).contiguous()


def raw_layer(scheme: str, experts: int, hidden: int, inter: int) -> moe.RawWeights:
    fields: dict[str, Any] = {}
    for name, rows, size in (("w13", 2 * inter, hidden), ("w2", hidden, inter)):
        if scheme == "nvfp4":
            fields[name] = random_codes(experts, rows, size // 2)
            fields[name + "_scale"] = random_codes(experts, rows, size // 16).view(torch.float8_e4m3fn)
            fields[name + "_scale_2"] = torch.ones((experts, 1) if name == "w13" else (experts,))
        elif scheme == "mxfp4":
            fields[name] = random_codes(experts, rows, size // 2)
            fields[name + "_scale"] = random_codes(experts, rows, size // 32)
        elif scheme == "int4":
            fields[name] = random_codes(experts, rows, size // 2).view(torch.int32)
            fields[name + "_scale"] = torch.ones(experts, rows, size // GROUP, dtype=torch.bfloat16)
        elif scheme == "fp8_block":
            fields[name] = random_codes(experts, rows, size).view(torch.float8_e4m3fn)
            fields[name + "_scale"] = torch.ones(experts, rows // 128, size // 128)
        else:
            fields[name] = random_codes(experts, rows, 2 * size).view(torch.bfloat16)
    return moe.RawWeights(scheme, **fields)


def measure(scheme: str, experts: int, hidden: int, inter: int) -> dict[str, Any]:
    raw = raw_layer(scheme, experts, hidden, inter)
    size = sum(t.nbytes for t in vars(raw).values() if isinstance(t, torch.Tensor))
    with Peak() as peak:
        begin = time.perf_counter()
        prepared = moe.prepare(raw, act_format="none", backend="cpu")
        seconds = time.perf_counter() - begin
    del prepared
    return {
        "scheme": scheme,
        "layer_gib": round(size / 2**30, 2),
        "seconds": round(seconds, 2),
        "growth": round(peak.growth / size, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--schemes", nargs="+", default=["nvfp4"])
    parser.add_argument("--json", type=Path, help="append one line per measurement to this file")
    args = parser.parse_args()
    machine = {"machine": processor(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    measure(args.schemes[0], 2, 256, 128)  # everything is imported then
    for scheme in args.schemes:
        sizes = (args.experts, args.hidden, args.intermediate)
        line = {**machine, "shape": sizes, **measure(scheme, *sizes)}
        print(json.dumps(line), flush=True)
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
