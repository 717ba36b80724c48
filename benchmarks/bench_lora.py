#!/usr/bin/env python3
"""What adapters of rank 16 cost beside frozen NVFP4 experts: times, kernels, launches, memory, few tokens.

    python benchmarks/bench_lora.py --shapes qwen3_30b --tokens 4096,16384 --out results.jsonl

A row for each layer and number of tokens, without adapters (`plain`) and with them (`lora`): milliseconds of the
forward pass and of a step (gradients to hidden states, routing weights, factors), medians on the host's clock, the
device waited for. On a GPU also as replays of a CUDA graph, milliseconds of all kernels and of the largest, their
launches, and MiB at the peak beyond what there was before. --few: forward passes alone, eager and as graphs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_backward import SHAPES, Adapted, batch, random_layer

import torch_moe_ops as moe

Step = Callable[[], Any]
PROFILED = 3  # steps


def median_ms(step: Step, device: str, repeats: int = 12) -> float:
    """Milliseconds of a call, after three that do not count."""
    found = []
    for i in range(repeats + 3):
        _wait(device)
        begin = time.perf_counter()
        step()
        _wait(device)
        if i >= 3:
            found.append(time.perf_counter() - begin)
    return round(statistics.median(found) * 1e3, 4)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def captured(step: Step) -> Step:
    """The replay of a CUDA graph of a step."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def kernels(step: Step, most: int = 8) -> tuple[dict[str, float], float]:
    """Milliseconds of a step's kernels by name, the largest ones and "all", and how many launches it has."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    events = [e for e in profile.key_averages() if e.self_device_time_total > 0]
    events.sort(key=lambda e: -e.self_device_time_total)
    each = {e.key[:60]: round(e.self_device_time_total / PROFILED / 1e3, 4) for e in events[:most]}
    every = sum(e.self_device_time_total for e in events) / PROFILED / 1e3
    return {"all": round(every, 4), **each}, sum(e.count for e in events) / PROFILED


def peak_mib(step: Step) -> int:
    """Beyond what was allocated before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) >> 20


def steps_of(layers: dict[str, Any], given: tuple[torch.Tensor, ...]) -> Iterator[tuple[str, Step]]:
    """(name, a forward pass or a step) of each layer."""
    x, ids, weights, grad = given

    def forward(layer: Any) -> Step:
        def run() -> None:
            with torch.no_grad():
                layer(x, ids, weights)

        return run

    def step(layer: Any) -> Step:
        wanted = (x, weights, *getattr(layer, "learns", ()))
        return lambda: torch.autograd.grad(layer(x, ids, weights), wanted, grad)

    for way, layer in layers.items():
        yield f"{way}_forward", forward(layer)
        yield f"{way}_step", step(layer)


def measure(name: str, tokens: int, layers: dict[str, Any], device: str, few: bool) -> dict[str, Any]:
    """A row."""
    row: dict[str, Any] = {"layer": name, "tokens": tokens}
    for what, step in steps_of(layers, batch(SHAPES[name], tokens, device)):
        if few and what.endswith("step"):
            continue
        row[f"{what}_ms"] = median_ms(step, device)
        if device != "cuda":
            continue
        row[f"{what}_graph_ms"] = median_ms(captured(step), device)
        if not few:
            row[f"{what}_mib"] = peak_mib(step)
            row[f"{what}_kernels_ms"], row[f"{what}_launches"] = kernels(step)
    return row


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="qwen3_30b,dsv3", help="comma list of " + ", ".join(SHAPES))
    parser.add_argument("--tokens", default="4096,16384")
    parser.add_argument("--few", action="store_true", help="forward passes alone")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="a file of JSON lines, to which rows are added")
    args = parser.parse_args(argv)
    for name in args.shapes.split(","):
        raw = random_layer(SHAPES[name], args.device)
        w = moe.prepare(raw, act_format="none")
        layers = {"plain": lambda *given, w=w: moe.fused_moe_routed(*given, w), "lora": Adapted(w, raw)}
        for tokens in args.tokens.split(","):
            line = json.dumps(measure(name, int(tokens), layers, args.device, args.few))
            print(line, flush=True)
            if args.out:
                with args.out.open("a") as file:
                    file.write(line + "\n")
        del raw, w, layers
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
