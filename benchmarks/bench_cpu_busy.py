#!/usr/bin/env python3
"""Time of one MoE layer on the C++ CPU backend beside processes that keep its cores busy.

    taskset -c 2,3 python benchmarks/bench_cpu_busy.py

NVFP4 W4A16 at one token (the layer of bench_cpu.py), as many threads as the process may use cores: alone, beside as
many processes that do nothing but loop, and alone again. A line each, in milliseconds a call, and last the medians'
ratio. Run it where nothing else runs, and old and new in turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

import bench_cpu
import torch

EXPERTS, HIDDEN, INTER, TOP_K = 128, 2048, 768, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="per line")
    parser.add_argument("--name", default="", help="what the lines begin with")
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(cores)
    w = bench_cpu.random_layer("nvfp4", EXPERTS, HIDDEN, INTER, torch.bfloat16)
    x = torch.randn(1, HIDDEN).bfloat16()
    call = bench_cpu.caller(w, "nvfp4", "none", x, torch.empty_like(x))
    routes = bench_cpu.routings(1, EXPERTS, TOP_K)

    def show(what: str) -> float:
        times = sorted(bench_cpu.measure(call, routes, args.seconds))
        median, mean = statistics.median(times), statistics.mean(times)
        p90 = times[int(len(times) * 0.9)]
        text = f"best {times[0]:.3f} median {median:.3f} mean {mean:.3f} p90 {p90:.3f}"
        print(args.name, what, text, flush=True)
        return median

    quiet = show("quiet")
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
    try:
        time.sleep(0.5)
        busy = show("busy")
    finally:
        for loop in loops:
            loop.kill()
    quiet = (quiet + show("quiet")) / 2
    print(args.name, f"busy / quiet {busy / quiet:.2f}", flush=True)


if __name__ == "__main__":
    main()
