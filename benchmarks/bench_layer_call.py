"""What a call of one layer costs beside its kernels: `fused_moe_routed` of few tokens, gradients off.

    python benchmarks/bench_layer_call.py [--version NAME] [--large] [--parts] [--device cuda] [--json FILE]

Paths take turns in one process: `accepted`, as it is called; `checked`, the op on every call, as it is for calls that
are not like one before; `kernels`, the compiled op alone, with arguments that are made already (of CPUs). Tiny layers
(8 experts of 128 x 128) show the host's part with warm caches; a layer of Qwen3-30B's size (--large) shows it with
caches that its weights have passed through. On a GPU nothing is waited for, so that only the host is timed. --parts:
marks of a stopwatch within a checked call. To compare trees, run it from each in turns; `version` names the tree.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_cpu
import torch

import torch_moe_ops as moe
from torch_moe_ops.backends import cpu
from torch_moe_ops.ops import moe_routed, run
from torch_moe_ops.prepared import fused

TINY = (8, 128, 128)  # experts, hidden size, intermediate size
LARGE = (128, 2048, 768)
TOP_K = 8
Call = Callable[[int], Any]


def layer_of(scheme: str, backend: str, device: str, sizes: tuple[int, int, int]) -> moe.PreparedWeights:
    experts, hidden, inter = sizes
    one = [torch.randn(1, rows, k).bfloat16() / k**0.5 for rows, k in ((2 * inter, hidden), (hidden, inter))]
    w13, w2 = (t.expand(experts, *t.shape[1:]).contiguous() for t in one)
    raw = moe.RawWeights("none", w13, w2) if scheme == "none" else moe.quantize_experts(w13, w2, scheme=scheme)
    return moe.prepare(raw, act_format="none", backend=backend, device=device)


@contextmanager
def patched(module: Any, name: str, value: Any) -> Iterator[None]:
    """The module with another thing of that name, which it may lack."""
    before = vars(module).get(name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def checked() -> AbstractContextManager[None]:
    """Calls of layers as the op has them that is called each time."""
    return patched(fused, "accepted", SimpleNamespace(TAKEN_BY=()))


def compiled(op: Any) -> AbstractContextManager[None]:
    """Something else in the place of the CPU's compiled op."""
    return patched(cpu, "torch", SimpleNamespace(ops=SimpleNamespace(moeq_C=SimpleNamespace(experts=op))))


def paths_of(call: Call, device: str) -> dict[str, Call]:
    """By name: what is called."""

    def checked_call(i: int) -> None:
        with checked():
            call(i)

    paths = {"accepted": call, "checked": checked_call}
    if vars(fused).get("accepted") is None:  # a tree of before
        paths = {"checked": call}
    if device == "cpu":
        paths["kernels"] = kernels_of(call)
    return paths


def kernels_of(call: Call) -> Call:
    """The compiled op with the arguments that the layer's calls give it, kept for each routing."""
    given: list[Any] = []
    with checked(), compiled(lambda *args: given.append(args)):
        for i in range(bench_cpu.ROUTINGS):
            call(i)
    return lambda i: torch.ops.moeq_C.experts(*given[i % len(given)])


def in_turns(paths: dict[str, Call], rounds: int, wait: Callable[[], None]) -> dict[str, list[float]]:
    """Microseconds of each call; paths change after each round of routings."""
    times: dict[str, list[float]] = {name: [] for name in paths}
    for one in range(rounds + 1):
        for name, call in paths.items():
            wait()
            for i in range(bench_cpu.ROUTINGS):
                begin = time.perf_counter_ns()
                call(i)
                end = time.perf_counter_ns()
                if one:
                    times[name].append((end - begin) / 1e3)
    return times


MARKED = (  # what is called within a checked call, in order
    (moe_routed, "plan_of"),
    (moe_routed, "check_experts"),
    (moe_routed, "check_topk"),
    (run, "output"),
    (run, "completed"),
    (cpu, "_in_their_terms"),
)


def parts_of(call: Call, rounds: int) -> dict[str, list[float]]:
    """Microseconds of a checked call between the marks of a stopwatch, by what they begin with."""
    marks: list[tuple[str, int]] = []

    def marked(name: str, function: Any, end: str = "") -> Any:
        def also_marks(*args: Any) -> Any:
            marks.append((name, time.perf_counter_ns()))
            result = function(*args)
            if end:
                marks.append((end, time.perf_counter_ns()))
            return result

        return also_marks

    for module, name in MARKED:
        setattr(module, name, marked(name.strip("_"), getattr(module, name)))
    kernels = marked("kernels, with their dispatch", torch.ops.moeq_C.experts, "return")
    ops = {name: marked("dispatch of the op", op) for name, op in fused._ROUTED.items()}
    parts: dict[str, list[float]] = {}
    with checked(), compiled(kernels), patched(fused, "_ROUTED", ops):
        for i in range(rounds * bench_cpu.ROUTINGS):
            begin = time.perf_counter_ns()
            call(i)
            end = time.perf_counter_ns()
            seen = [("fused_moe_routed", begin), *marks, ("", end)]
            marks.clear()
            for (name, since), (_, until) in pairwise(seen):
                parts.setdefault(name, []).append((until - since) / 1e3)
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", default="this", help="of this tree, for the lines")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--schemes", nargs="+", default=["nvfp4", "mxfp4"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--large", action="store_true", help="a layer of Qwen3-30B's size instead of a tiny one")
    parser.add_argument("--parts", action="store_true", help="of a checked call on a CPU, at the end")
    parser.add_argument("--rounds", type=int, default=20, help="of 16 routings")
    parser.add_argument("--json", type=Path, help="append one line per measurement to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    wait = torch.cuda.synchronize if args.device != "cpu" else lambda: None
    machine = bench_cpu.processor() if args.device == "cpu" else torch.cuda.get_device_name()
    about = {"version": args.version, "machine": machine, "torch": torch.__version__, "threads": args.threads}
    sizes = LARGE if args.large else TINY
    calls: dict[tuple[str, int], Call] = {}
    for scheme in args.schemes:
        torch.manual_seed(0)
        w = layer_of(scheme, args.backend, args.device, sizes)
        for tokens in args.tokens:
            x = torch.randn(tokens, sizes[1], device=args.device).bfloat16()
            routes = [tuple(t.to(args.device) for t in r) for r in bench_cpu.routings(tokens, sizes[0], TOP_K)]

            def call(i: int, x: Any = x, w: Any = w, routes: Any = routes) -> None:
                moe.fused_moe_routed(x, *routes[i % len(routes)], w)

            calls[scheme, tokens] = call
    measured = {}
    with torch.no_grad():
        for key, call in calls.items():
            for path, times in in_turns(paths_of(call, args.device), args.rounds, wait).items():
                measured[(*key, path)] = times
        if args.parts:  # the last one, as the marks stay
            for name, times in parts_of(call, args.rounds).items():
                measured[(*key, f"part: {name}")] = times
    for (scheme, tokens, path), times in measured.items():
        line = {"scheme": scheme, "backend": args.backend, "sizes": list(sizes), "tokens": tokens, "path": path}
        line |= {"median_us": round(statistics.median(times), 2), "best_us": round(min(times), 2), "calls": len(times)}
        print("  ".join(f"{key}={value}" for key, value in line.items()), flush=True)
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps(about | line) + "\n")


if __name__ == "__main__":
    main()
