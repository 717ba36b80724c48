"""Time of one MoE layer on the C++ CPU backend: median over rotating routings, weights coming from DRAM.

    python benchmarks/bench_cpu.py                       # Qwen3-30B-A3B layer, W4A4 and W4A16, M = 1 .. 256
    python benchmarks/bench_cpu.py --tokens 1 64 --schemes none --json benchmarks/results/cpu.jsonl

Weights are random codes with plausible scales: the time does not depend on their values. `GB/s` counts the
packed bytes of the experts that the routing touches, `GFLOP/s` two operations per weight and routed row.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch_moe_ops._C  # noqa: F401  (registers the private ops)
from torch import Tensor

from torch_moe_ops.backends.cpu_panels import layout
from torch_moe_ops.backends.cpu_panels.huge_pages import with_huge_pages
from torch_moe_ops.core.call import KERNEL_FIELDS

ROUTINGS = 16
ROUNDS = 3  # in which instruction sets take turns
INT4_GROUP = 128


def random_layer(
    scheme: str, experts: int, hidden: int, inter: int, dtype: torch.dtype, huge_pages: bool = False
) -> dict[str, Tensor]:
    """Packed weights with random bits where any bit pattern is a number, small random numbers elsewhere."""
    tensors: dict[str, Tensor] = {}
    scales = {"int4": (torch.bfloat16, INT4_GROUP), "int8": (torch.float32, 0)}.get(scheme, (None, 0))
    for name, (shape, kind) in layout.packed_shapes(scheme, experts, hidden, inter, True, dtype, *scales).items():
        if name.endswith("_scale"):
            one = 127 if kind == torch.uint8 else 1  # of powers of two, the exponent's byte
            tensors[name] = torch.full(shape, one, dtype=torch.float32).to(kind)
        elif kind == torch.uint8:
            tensors[name] = torch.randint(0, 256, shape, dtype=torch.uint8)
        else:
            tensors[name] = torch.randn(shape, dtype=torch.float32).to(kind)
        if huge_pages:
            tensors[name] = with_huge_pages(torch.empty_like(tensors[name])).copy_(tensors[name])
    return tensors


def routings(tokens: int, experts: int, top_k: int) -> list[tuple[Tensor, Tensor]]:
    made = []
    for seed in range(ROUTINGS):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(tokens, experts, generator=generator)
        weights, ids = logits.softmax(-1).topk(top_k)
        made.append((ids.int(), weights.contiguous()))
    return made


def caller(
    w: dict[str, Tensor], scheme: str, act_format: str, hidden: Tensor, out: Tensor
) -> Callable[[Tensor, Tensor], None]:
    experts = w["w13"].shape[0]
    alphas = torch.full((experts,), 0.01)
    gscale = torch.tensor(100.0) if act_format == "nvfp4" else None

    given = {**w, "hidden_states": hidden, "g1_alphas": alphas, "g2_alphas": alphas, "activation": "silu"}
    given |= {"a1_gscale": gscale, "a2_gscale": gscale, "swiglu_alpha": 1.0, "swiglu_beta": 0.0}
    given |= {"swiglu_limit": float("inf"), "local_expert_offset": 0, "router_weight_on_input": False}

    def call(ids: Tensor, weights: Tensor) -> None:
        routed = {**given, "topk_ids": ids, "topk_weights": weights}
        arguments = [routed.get(name) for name in KERNEL_FIELDS]
        torch.ops.moeq_C.experts(out, *arguments, scheme=scheme, act_format=act_format)

    return call


def measure(
    call: Callable[[Tensor, Tensor], None],
    routes: list[tuple[Tensor, Tensor]],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Milliseconds of each call by `clock`, the routing changing from call to call."""
    for ids, weights in routes[:2]:
        call(ids, weights)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < ROUTINGS:
        ids, weights = routes[len(times) % ROUTINGS]
        start = clock()
        call(ids, weights)
        times.append((clock() - start) * 1e3)
    return times


def take_turns(
    call: Callable[[Tensor, Tensor], None],
    routes: list[tuple[Tensor, Tensor]],
    isas: list[str],
    seconds: float,
    clock: Callable[[], float],
) -> dict[str, list[float]]:
    """Milliseconds of each call by instruction set, measured in turns."""
    times: dict[str, list[float]] = {isa: [] for isa in isas}
    for _ in range(ROUNDS if len(isas) > 1 else 1):
        for isa in isas:
            torch.ops.moeq_C.use_cpu_isa(isa)
            times[isa] += measure(call, routes, seconds / (ROUNDS if len(isas) > 1 else 1), clock)
    return times


def run(args: argparse.Namespace, scheme: str, act_format: str) -> list[dict[str, Any]]:
    w = random_layer(scheme, args.experts, args.hidden, args.intermediate, torch.bfloat16, args.huge_pages)
    bytes_per_expert = sum(t[0].numel() * t.element_size() for t in w.values())
    rows = []
    for tokens in args.tokens:
        hidden = torch.randn(tokens, args.hidden).bfloat16()
        out = torch.empty_like(hidden)
        routes = routings(tokens, args.experts, args.top_k)
        touched = statistics.mean(len(ids.unique()) for ids, _ in routes)
        flop = 2.0 * 3 * args.hidden * args.intermediate * tokens * args.top_k
        call = caller(w, scheme, act_format, hidden, out)
        clock = time.process_time if args.processor_time else time.perf_counter
        for isa, times in take_turns(call, routes, args.isas, args.seconds, clock).items():
            median = statistics.median(times)
            rows.append(
                {
                    "isa": isa,
                    "scheme": scheme,
                    "act_format": act_format,
                    "tokens": tokens,
                    "median_ms": round(median, 4),
                    "best_ms": round(min(times), 4),
                    "gb_per_s": round(touched * bytes_per_expert / median / 1e6, 1),
                    "gflop_per_s": round(flop / median / 1e6, 1),
                    "calls": len(times),
                }
            )
            print("  ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    return rows


def processor() -> str:
    """The processor's name, where the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--schemes", nargs="+", default=["nvfp4:nvfp4", "nvfp4:none"], help="scheme:act_format")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--isas", nargs="+", default=[], help="instruction sets to compare, in turns")
    parser.add_argument("--seconds", type=float, default=2.0, help="per measurement")
    parser.add_argument("--huge-pages", action="store_true", help="weights lie as those that the library packs")
    parser.add_argument("--processor-time", action="store_true", help="of one thread, where other processes are busy")
    parser.add_argument("--json", type=Path, help="append one line per measurement to this file")
    args = parser.parse_args()
    if args.processor_time:
        args.threads = 1
    torch.set_num_threads(args.threads)
    args.isas = args.isas or [torch.ops.moeq_C.cpu_isa()]
    machine = {
        "machine": processor(),
        "threads": args.threads,
        "clock": "processor" if args.processor_time else "wall",
        "torch": torch.__version__,
        "shape": [args.experts, args.top_k, args.hidden, args.intermediate],
        **({"huge_pages": True} if args.huge_pages else {}),
    }
    print(machine)
    for pair in args.schemes:
        scheme, _, act_format = pair.partition(":")
        for row in run(args, scheme, act_format or "none"):
            if args.json:
                args.json.parent.mkdir(parents=True, exist_ok=True)
                with args.json.open("a") as file:
                    file.write(json.dumps({**machine, **row}) + "\n")


if __name__ == "__main__":
    main()
