#!/usr/bin/env python3
"""What the host does for a training step of packed experts on a Hopper GPU, without a GPU.

    python benchmarks/bench_backward_host.py --json results.jsonl
    python benchmarks/bench_backward_host.py --ranks 0 --profile own

Forward and backward of Qwen3-30B's layer in NVFP4 as `cuda_sm90` lays it out, gradients to hidden states and routing
weights; with adapters of a rank, to their factors too. Triton has to be installed; host_gpu.py has what stands in for
the GPU. A line has the microseconds of a step (the median, and what a tenth of all steps was within), how often each
kernel was launched, and how many launches Triton looked up; then the microseconds of one launch that it looks up, of
one that Triton makes of the kernel that it found, of one that goes there as those of a pass do (direct.py, with Triton
3.6), and of what stands there in place of C code, which asks tensors for their addresses.

In the time: our Python, torch's dispatcher and autograd, Triton's Python for launches that it makes, buffers.
Not in it: the CUDA driver and the C code in front of it, what Hopper's own kernels take to be launched, comparing
devices of arguments, autograd's second thread; small operations of torch (a zeroed buffer) are the host's, which cost
less than launches; buffers come from malloc's heap. So it compares versions of the Python code. It does not say what a
step takes: the host of results/h100_h200_backward_steps.jsonl takes 36 and 14.5 us for the two kinds of launch.
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import gc
import json
import platform
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import triton
from bench_backward import SHAPES, Shape
from host_gpu import host_gpu

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.backends.triton_engine import grouped, known
from torch_moe_ops.core.layout import Sizes
from torch_moe_ops.core.schemes import SCHEMES

_MMAP_MAX, _TRIM_THRESHOLD = -4, -1  # of mallopt


def keep_memory() -> None:
    """Buffers from the heap, as a GPU's come from torch's cache: the system is asked for none after the first steps."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_MAX, 0)
        libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def layer_of(shape: Shape) -> moe.PreparedWeights:
    """A prepared layer whose numbers nobody reads."""
    backend, scheme = BACKENDS["cuda_sm90"], SCHEMES["nvfp4"]
    specs = backend.layout.specs(scheme, Sizes(shape.experts, shape.hidden, shape.inter, True, torch.uint8))
    stored = {name: torch.empty(shapes[0], dtype=dtypes[0]) for name, (shapes, dtypes) in specs.items()}
    return moe.PreparedWeights(
        scheme="nvfp4",
        backend="cuda_sm90",
        layout=backend.layout.name,
        activation="silu",
        act_format="none",
        weight_policy="exact",
        num_experts=shape.experts,
        num_local_experts=shape.experts,
        local_expert_offset=0,
        hidden_size=shape.hidden,
        intermediate_size=shape.inter,
        router_weight_on_input=False,
        swiglu_alpha=None,
        swiglu_beta=None,
        swiglu_limit=None,
        g1_alphas=torch.empty(shape.experts),
        g2_alphas=torch.empty(shape.experts),
        **stored,
    )


def step_of(shape: Shape, tokens: int, rank: int) -> Callable[[], Any]:
    """A training step of the layer; rank: of its adapters, 0 for none."""
    w, (e, h, i) = layer_of(shape), (shape.experts, shape.hidden, shape.inter)
    x = torch.empty(tokens, h, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.empty(tokens, shape.top_k, requires_grad=True)
    ids, grad = torch.empty(tokens, shape.top_k, dtype=torch.int32), torch.empty(tokens, h, dtype=torch.bfloat16)
    sizes = ((rank, h), (2 * i, rank), (rank, i), (h, rank)) if rank else ()
    learns = [torch.empty(e, *size, dtype=torch.bfloat16, requires_grad=True) for size in sizes]
    lora = moe.Lora(*learns) if rank else None

    def step() -> Any:
        out = moe.fused_moe_routed(x, ids, weights, w, lora=lora)
        return torch.autograd.grad(out, (x, weights, *learns), grad)

    return step


def microseconds(call: Callable[[], Any], calls: int) -> list[float]:
    """Of each call, ascending."""
    for _ in range(20):
        call()
    found = []
    gc.collect()
    for _ in range(calls):
        begin = time.perf_counter()
        call()
        found.append((time.perf_counter() - begin) * 1e6)
    return sorted(found)


def measure(shape: str, tokens: int, rank: int, steps: int) -> dict[str, Any]:
    step = step_of(SHAPES[shape], tokens, rank)
    with host_gpu() as counts:
        times = microseconds(step, steps)
        counts.clear()
        step()
        launches, looked_up = dict(counts.launches), counts.looked_up.total()
    found: dict[str, Any] = {"layer": shape, "tokens": tokens, "rank": rank}
    found |= {"step_us": round(statistics.median(times), 1), "tenth_us": round(times[len(times) // 10], 1)}
    return found | {"launches": sum(launches.values()), "looked_up": looked_up, "kernels": launches}


def of_launches(calls: int) -> dict[str, float]:
    """Microseconds of a launch of grouped_kernel: looked up by Triton, found again, and of the stand-in for C alone."""
    rows, weights, out = (torch.empty(n, dtype=torch.bfloat16) for n in ((64, 256), (4, 256, 128), (64, 128)))
    product = grouped.Product(rows, None, torch.empty(4, dtype=torch.int32), False, out)
    with host_gpu():
        for _ in range(2):
            product(weights, 0, 4)
        launch, found = product.launch, next(iter(known.FOUND.values()))
        tensors, named, compiled = launch.tensors, launch.constants, found.compiled
        args = (*tensors, 0, 4, *found.constants)
        ways: dict[str, Callable[[], Any]] = {
            "looked_up_us": lambda: launch.kernel[(132,)](*tensors, 0, 4, **named, **launch.options),
            "by_triton_us": lambda: compiled[(132, 1, 1)](*args),
            "found_again_us": lambda: launch((132,), 0, 4),
            "stand_in_us": lambda: compiled.run.launch(*range(13), *args),
        }
        return {name: round(statistics.median(microseconds(way, calls)), 2) for name, way in ways.items()}


def profile(shape: str, tokens: int, rank: int, by: str, steps: int) -> None:
    """A table of microseconds of a step, all larger than they are without a profiler."""
    step, profiler = step_of(SHAPES[shape], tokens, rank), cProfile.Profile()
    with host_gpu():
        microseconds(step, 1)
        profiler.enable()
        for _ in range(steps):
            step()
        profiler.disable()
    rows = [(own, total, calls, where) for where, (_, calls, own, total, _) in pstats.Stats(profiler).stats.items()]  # type: ignore[attr-defined]
    print(f"{'calls':>7} {'own us':>8} {'all us':>8}  of a step of {tokens} tokens, rank {rank}")
    for own, total, calls, (file, line, name) in sorted(rows, key=lambda row: -row[0 if by == "own" else 1])[:60]:
        where = f"{Path(file).name}:{line} {name}"
        print(f"{calls / steps:7.1f} {own / steps * 1e6:8.1f} {total / steps * 1e6:8.1f}  {where}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3_30b", choices=list(SHAPES))
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--ranks", default="0,16", help="comma list of adapters' ranks, 0 for none")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--profile", choices=["own", "all"], help="a table by cProfile instead, sorted so")
    parser.add_argument("--label", default="", help="of the lines")
    parser.add_argument("--json", type=Path, help="a file to which lines are added")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    keep_memory()
    given = [(args.shape, args.tokens, int(rank)) for rank in args.ranks.split(",")]
    if args.profile:
        for one in given:
            profile(*one, args.profile, args.steps)
        return 0
    about = {"label": args.label, "torch": torch.__version__, "triton": triton.__version__}
    about["python"] = platform.python_version()
    for line in (*(measure(*one, args.steps) for one in given), of_launches(args.steps)):
        print(json.dumps(line))
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps(about | line) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
