"""One MoE layer on this CPU beside vLLM's kernels, in turns in one process; results compared with float64.

    bash benchmarks/peers/build_vllm_cpu.sh .vllmcpu          # for the torch of this environment
    python benchmarks/bench_cpu_vllm.py --library .vllmcpu/vllm_cpu.so [--schemes mxfp4 int4 none] [--json FILE]

vLLM's ops are called by themselves, on weights packed as its CPU layers pack them (0.32, experts/cpu_moe.py). So is the
op of our kernels (`call` "op"); beside it stands what users call, `fused_moe_routed` ("layer"), with all that Python
does. Lines of one `scheme` and `tokens` are medians of runs of the same routings and inputs, which take turns, in every
second round from the last to the first:

    mxfp4   ours with MXFP4 and with NVFP4 weights (16-bit activations) beside vLLM's MXFP4, which has no NVFP4
    int4    groups of 128, activations in dynamic int8, on both sides
    none    bfloat16 on both sides; vLLM multiplies by AMX where the CPU has it, as its layers choose

Ours lie in huge pages where the system gives them, as the library packs them. vLLM's lie as its own packing leaves them
(`pages` "usual") and, in a second copy, like ours ("huge"). Of a line of vLLM's, `ratio` is its median over that of our
op with the same weights, `ratio_nvfp4` over that with NVFP4; `ratio_layer` and `ratio_layer_nvfp4` are over what users
call. A result that is too far from float64, or from ours, ends the program.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import bench_cpu
import torch
from float64_layer import layer_in_float64, relative
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.backends import cpu
from torch_moe_ops.backends.cpu_panels.huge_pages import with_huge_pages
from torch_moe_ops.core.call import KERNEL_FIELDS

EXPERTS, TOP_K, HIDDEN, INTER = 128, 8, 2048, 768  # Qwen3-30B-A3B
CHECKED = 2  # first tokens of a batch, of which the distance to float64 is taken
# Relative L2 that a result may be from float64, and from the other side's: activations in 16 bits, and in 8.
BOUNDS = {"none": 0.01, "int8": 0.06}
INT4_GROUP = 128
GPTQ, INT4_W4A8, MXFP4 = 1, 3, 4  # vLLM's numbers of packings and of methods
OURS, VLLM = "torch_moe_ops", "vllm 0.32"
Run = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Side:
    """One way to run the layer: whose, of which weights, how they lie in memory, and what it is compared with."""

    library: str
    call: str
    weights: str
    pages: str
    run: Run
    raw: moe.RawWeights


def experts_of(first: Tensor) -> Tensor:
    """[E, rows, k]: the first expert's entries, moved along by another prime number of them for each other expert."""
    flat = first.flatten()
    return torch.stack([flat.roll(expert * 7919) for expert in range(EXPERTS)]).view(EXPERTS, *first.shape)


def matrix(scheme: str, rows: int, k: int) -> tuple[Tensor, Tensor | None]:
    """Random weights and their scales in a checkpoint's order, of a standard deviation near 1 / sqrt(k)."""
    if scheme == "none":
        return experts_of((torch.randn(rows, k) / k**0.5).bfloat16()), None
    codes = experts_of(torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8))
    if scheme == "nvfp4":
        return codes, experts_of((0.5 + torch.rand(rows, k // 16)).to(torch.float8_e4m3fn).view(torch.uint8))
    if scheme == "mxfp4":
        return codes, experts_of(torch.randint(119, 123, (rows, k // 32)).byte())
    scale = (0.5 + torch.rand(rows, k // INT4_GROUP)) / (4.6 * k**0.5)
    return codes.view(torch.int32), experts_of(scale.bfloat16())


def raw_layer(scheme: str) -> moe.RawWeights:
    torch.manual_seed(0)
    (w13, w13_scale), (w2, w2_scale) = matrix(scheme, 2 * INTER, HIDDEN), matrix(scheme, HIDDEN, INTER)
    scales: dict[str, Tensor] = {}
    if w13_scale is not None and w2_scale is not None:
        scales = {"w13_scale": w13_scale, "w2_scale": w2_scale}
    if scheme == "nvfp4":
        scales = {name: scale.view(torch.float8_e4m3fn) for name, scale in scales.items()}
        scales |= {"w13_scale_2": torch.full((EXPERTS, 1), 0.3 / HIDDEN**0.5)}
        scales |= {"w2_scale_2": torch.full((EXPERTS,), 0.3 / INTER**0.5)}
    return moe.RawWeights(scheme, w13, w2, **scales)


def one_expert(raw: moe.RawWeights, expert: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gate, up and down of one expert in float64: what the checkpoint means."""
    tensors = {name: t for name in ("w13", "w2") for t in [getattr(raw, name)]}
    for name in ("w13_scale", "w2_scale", "w13_scale_2", "w2_scale_2"):
        if getattr(raw, name) is not None:
            tensors[name] = getattr(raw, name)
    w13, w2 = moe.dequantize_experts(replace(raw, **{name: t[expert : expert + 1] for name, t in tensors.items()}))
    gate, up = w13[0].double().chunk(2)
    return gate, up, w2[0].double()


def ours(weights: str) -> list[Side]:
    """The op of the kernels, with what the layer gives it, and the layer."""
    raw = raw_layer(weights)
    w = moe.prepare(raw, act_format="int8" if weights == "int4" else "none", backend="cpu")

    def layer(x: Tensor, ids: Tensor, topk_weights: Tensor) -> Tensor:
        return moe.fused_moe_routed(x, ids, topk_weights, w)

    given: list[tuple[Any, ...]] = []
    terms = cpu._in_their_terms

    def keep(call: Any) -> tuple[Any, ...]:
        given.append(terms(call))
        return given[-1]

    x, ids = torch.zeros(1, HIDDEN).bfloat16(), torch.zeros(1, TOP_K, dtype=torch.int32)
    with mock.patch.object(cpu, "_in_their_terms", keep):  # which a call with `out` asks for each time
        moe.fused_moe_routed(x, ids, torch.ones(1, TOP_K), w, out=torch.empty_like(x))
    arguments = list(given[0])
    x_at, ids_at, weights_at = (KERNEL_FIELDS.index(n) for n in ("hidden_states", "topk_ids", "topk_weights"))

    def op(x: Tensor, ids: Tensor, topk_weights: Tensor) -> Tensor:
        arguments[x_at], arguments[ids_at], arguments[weights_at] = x, ids, topk_weights
        out = torch.empty_like(x)
        torch.ops.moeq_C.experts(out, *arguments)
        return out

    return [Side(OURS, call, weights, "huge", run, raw) for call, run in (("op", op), ("layer", layer))]


def vllm_weights(scheme: str, codes: Tensor, scale: Tensor | None, isa: str) -> list[Tensor | None]:
    """Weights, scales and zero points as vLLM's layers pack them."""
    ops = torch.ops._C
    if scheme == "none":
        packed = torch.empty_like(codes)
        ops.prepack_moe_weight(codes, packed, isa)
        return [packed, None, None]
    assert scale is not None
    if scheme == "mxfp4":
        return [ops.convert_weight_packed(codes), ops.convert_scale_packed(scale), None]
    # GPTQ's order: word r of a column has rows 8r to 8r + 7 of K. Its zero points of 7 mean 8.
    groups = scale.transpose(1, 2).contiguous()
    zeros = torch.full((EXPERTS, groups.shape[1], groups.shape[2] // 8), 0x77777777, dtype=torch.int32)
    packed, zeros, groups = ops.convert_weight_packed_scale_zp(codes.transpose(1, 2).contiguous(), zeros, groups, GPTQ)
    return [packed, groups, zeros]


def in_huge_pages(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else with_huge_pages(torch.empty_like(tensor)).copy_(tensor)


def vllm_run(scheme: str, w13: list[Tensor | None], w2: list[Tensor | None], isa: str) -> Run:
    ops = torch.ops._C
    (a, a_scale, a_zero), (b, b_scale, b_zero) = w13, w2

    def bfloat16(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.empty_like(x)
        ops.cpu_fused_moe(out, x, a, b, None, None, weights, ids, False, "silu", isa)
        return out

    def quantized(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.empty_like(x)
        method = {"mxfp4": MXFP4, "int4": INT4_W4A8}[scheme]
        none = [None] * 6  # scales of activations, sizes of blocks, biases, constants of other activations
        ops.fused_experts_cpu(out, x, a, b, weights, ids, method, a_scale, b_scale, a_zero, b_zero, *none, True)
        return out

    return bfloat16 if scheme == "none" else quantized


def sides_of(scheme: str, isa: str, pages: list[str]) -> list[Side]:
    """Ours of these weights come first, then vLLM's, then ours of NVFP4 beside MXFP4."""
    nvfp4 = ours("nvfp4") if scheme == "mxfp4" else []
    sides = ours(scheme)
    raw = sides[0].raw
    usual = [vllm_weights(scheme, w, scale, isa) for w, scale in ((raw.w13, raw.w13_scale), (raw.w2, raw.w2_scale))]
    if "usual" in pages:
        sides.append(Side(VLLM, "op", scheme, "usual", vllm_run(scheme, usual[0], usual[1], isa), raw))
    if "huge" in pages:
        huge = [[in_huge_pages(t) for t in packed] for packed in usual]
        sides.append(Side(VLLM, "op", scheme, "huge", vllm_run(scheme, huge[0], huge[1], isa), raw))
    return sides + nvfp4


def mib_in_huge_pages() -> int | None:
    """Of this process, as Linux tells it."""
    file = Path("/proc/self/smaps_rollup")
    found = [line.split()[1] for line in file.read_text().splitlines() if line.startswith("AnonHugePages")]
    return int(found[0]) // 1024 if found else None


class Checked:
    """Inputs of one scheme; what its sides give for them is compared."""

    def __init__(self, scheme: str, sides: list[Side], most: int) -> None:
        self.bound = BOUNDS["int8" if scheme == "int4" else "none"]
        self.x = torch.randn(most, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
        self.ids, self.weights = bench_cpu.routings(most, EXPERTS, TOP_K)[0]
        self.want: dict[str, Tensor] = {}
        for side in sides:
            if side.weights not in self.want:
                first = [t[:CHECKED] for t in (self.x, self.ids, self.weights)]
                self.want[side.weights] = layer_in_float64(partial(one_expert, side.raw), *first)

    def distances(self, sides: list[Side], tokens: int) -> list[tuple[float, float]]:
        """Of each side: to float64, and to the first side of the same weights; both within the bound."""
        x, ids, weights = self.x[:tokens], self.ids[:tokens].contiguous(), self.weights[:tokens].contiguous()
        first: dict[str, Tensor] = {}
        found = []
        for side in sides:
            got = side.run(x, ids, weights)
            ours_of_these = first.setdefault(side.weights, got)
            want = self.want[side.weights][:tokens]
            far = relative(got[: len(want)], want), relative(got, ours_of_these)
            if not all(value <= self.bound for value in far):  # NaN is not
                what = f"{side.library}, {side.weights}, {tokens} tokens"
                raise SystemExit(f"{what}: {far[0]:.3g} from float64, {far[1]:.3g} from ours; at most {self.bound}")
            found.append(far)
        return found


def caller(run: Run, x: Tensor) -> Callable[[Tensor, Tensor], None]:
    def call(ids: Tensor, weights: Tensor) -> None:
        run(x, ids, weights)

    return call


def measure(
    scheme: str, sides: list[Side], checked: Checked, tokens: int, args: argparse.Namespace
) -> list[dict[str, Any]]:
    far = checked.distances(sides, tokens)
    x, routes = checked.x[:tokens], bench_cpu.routings(tokens, EXPERTS, TOP_K)
    times: list[list[float]] = [[] for _ in sides]
    clock = time.process_time if args.processor_time else time.perf_counter
    turns = list(zip(sides, times, strict=True))
    for turn in range(args.rounds):
        for side, values in turns if turn % 2 == 0 else turns[::-1]:
            values += bench_cpu.measure(caller(side.run, x), routes, args.seconds / args.rounds, clock)
    medians = [statistics.median(values) for values in times]
    of_ours = {(s.weights, s.call): m for s, m in zip(sides, medians, strict=True) if s.library == OURS}
    lines = []
    for side, values, median, (to_float64, to_ours) in zip(sides, times, medians, far, strict=True):
        line: dict[str, Any] = {"library": side.library, "call": side.call, "scheme": scheme, "weights": side.weights}
        line |= {"pages": side.pages, "tokens": tokens, "median_ms": round(median, 4), "best_ms": round(min(values), 4)}
        line |= {"calls": len(values), "to_float64": float(f"{to_float64:.3g}")}
        if side.library == VLLM:
            line["to_ours"] = float(f"{to_ours:.3g}")
            for (weights, call), time_of_ours in of_ours.items():
                name = "ratio" + ("_layer" if call == "layer" else "") + ("_nvfp4" if weights == "nvfp4" else "")
                line[name] = round(median / time_of_ours, 3)
        lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, required=True, help="vLLM's ops, as build_vllm_cpu.sh makes them")
    parser.add_argument("--schemes", nargs="+", choices=["mxfp4", "int4", "none"], default=["mxfp4", "int4", "none"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--pages", nargs="+", choices=["usual", "huge"], default=["usual", "huge"], help="of vLLM's")
    parser.add_argument("--seconds", type=float, default=1.2, help="of each line")
    parser.add_argument("--rounds", type=int, default=4, help="in which the sides take turns")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--processor-time", action="store_true", help="of one thread, where other processes are busy")
    parser.add_argument("--json", type=Path, help="append one line per measurement to this file")
    args = parser.parse_args()
    args.threads = 1 if args.processor_time else args.threads
    torch.set_num_threads(args.threads)
    torch.ops.load_library(str(args.library.resolve()))
    amx = torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()
    isa = "amx" if amx else "vec"
    where = {"machine": bench_cpu.processor(), "threads": args.threads, "torch": torch.__version__}
    where |= {"clock": "processor" if args.processor_time else "wall"}
    where |= {"isa": torch.ops.moeq_C.cpu_isa(), "vllm_isa": isa, "shape": [EXPERTS, TOP_K, HIDDEN, INTER]}
    print(where, "load", os.getloadavg(), flush=True)
    for scheme in args.schemes:
        begin = time.perf_counter()
        sides = sides_of(scheme, isa, args.pages)
        checked = Checked(scheme, sides, max(*args.tokens, CHECKED))
        print(
            f"{scheme}: made in {time.perf_counter() - begin:.1f} s, {mib_in_huge_pages()} MiB in huge pages",
            flush=True,
        )
        for tokens in args.tokens:
            for line in measure(scheme, sides, checked, tokens, args):
                line["load"] = round(os.getloadavg()[0], 2)
                print("  ".join(f"{key}={value}" for key, value in line.items()), flush=True)
                if args.json:
                    args.json.parent.mkdir(parents=True, exist_ok=True)
                    with args.json.open("a") as file:
                        file.write(json.dumps(where | line) + "\n")


if __name__ == "__main__":
    main()
