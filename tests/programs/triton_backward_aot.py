"""Ahead-of-time compilation of the kernels of a backward pass, for a target that need not be present.

`python tests/programs/triton_backward_aot.py CAPABILITY PART PARTS`: every PARTS-th variant of a kernel from PART; the first
of each and all that decode weights in any case. Prints a line for each: its name, backend and scheme, bytes of shared memory,
and its products. Without PART and PARTS a line for each variant, its name and what is particular to it; nothing is compiled.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import torch
import triton
from lora_cases import factors_of
from problems import Case, make_batch, make_raw
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton_aot import signature_type

from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.backends.triton_engine import (
    backward_launch,
    dequantize,
    dequantize_bytes,
    dequantize_tiles,
    few,
    grouped,
    rank_sums,
    ranks,
    slots,
)
from torch_moe_ops.backends.triton_engine.backward_pass import Pass, RanksBySlot
from torch_moe_ops.core.call import FIELDS, ExpertsCall
from torch_moe_ops.core.layout import Sizes
from torch_moe_ops.core.schemes import SCHEMES
from torch_moe_ops.gradients import on_gpu
from torch_moe_ops.gradients.lora import Lora, LoraArguments
from torch_moe_ops.weights.raw_weights import RawWeights

_KERNELS = (
    (grouped, "grouped_kernel"),
    (backward_launch, "hidden_kernel"),
    (backward_launch, "weights_kernel"),
    (backward_launch, "bias_kernel"),
    (backward_launch, "gather_sum_kernel"),
    (few, "few_kernel"),
    (ranks, "low_kernel"),
    (ranks, "outer_kernel"),
    (rank_sums, "low_and_sums_kernel"),
    (rank_sums, "add_parts_kernel"),
    (slots, "slots_kernel"),
    (slots, "count_slots_kernel"),
    (slots, "start_slots_kernel"),
    (slots, "place_slots_kernel"),
    (dequantize, "dequantize_kernel"),
    (dequantize_tiles, "dequantize_tiles_kernel"),
    (dequantize_bytes, "dequantize_bytes_kernel"),
)
_OPTIONS = ("num_warps", "num_stages")
CASES = (
    (Case(hidden=256, inter=128, bias=True, experts=2), "triton"),
    (Case(hidden=256, inter=96, experts=2), "cuda_sm90"),
    (Case(hidden=256, inter=128, experts=2, scheme="int4", activation="swigluoai"), "cuda_sm90_int4"),
    (Case(hidden=256, inter=128, experts=2, scheme="fp8_block", activation="relu2_no_mul"), "triton"),
    (Case(hidden=256, inter=128, experts=2, scheme="fp8_block"), "cuda_sm90"),
    (Case(hidden=72, inter=40, experts=2, scheme="int8", dtype=torch.float16), "triton"),
)


class _Recorded:
    """Stands in for a kernel: keeps what would be launched."""

    def __init__(self, kernel: Any, found: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> None:
        self.kernel, self.found = kernel, found

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **constants: self.found.append((self.kernel, args, constants))


class _Elsewhere:
    """Products of a layer by kernels that are not Triton's (BySlot)."""

    def __init__(self, p: Pass) -> None:
        self.p = p

    def hidden(self, addend: RanksBySlot | None, out: torch.Tensor | None) -> None:
        pass

    def output(self, addend: RanksBySlot | None, out: torch.Tensor) -> None:
        pass


def launches(case: Case, backend: str, capability: int) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """What passes with and without adapters would launch on a GPU. Nothing runs."""
    raw = make_raw(case)
    x, ids, weights = make_batch(case)
    given = dict.fromkeys(FIELDS) | BACKENDS[backend].prepare(raw)
    given |= {"scheme": case.scheme, "act_format": "none", "weight_policy": "exact", "activation": case.activation}
    given |= {"router_weight_on_input": False, "local_expert_offset": 0, "num_experts": 0}
    given |= {"swiglu_alpha": 1.0, "swiglu_beta": 0.0, "swiglu_limit": 7.0}
    given |= {"hidden_states": x, "topk_ids": ids, "topk_weights": weights}
    if raw.w13_scale_2 is not None:
        given |= {"g1_alphas": raw.w13_scale_2, "g2_alphas": raw.w2_scale_2}
    call = ExpertsCall(**given)
    inter = BACKENDS[backend].layout.intermediate_size(SCHEMES[case.scheme], tuple(call.w2.shape))
    sizes = Sizes(case.experts, case.hidden, inter, raw.is_gated, call.w13.dtype)
    found: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    with ExitStack() as stack:
        for module, name in _KERNELS:
            stack.enter_context(mock.patch.object(module, name, _Recorded(getattr(module, name), found)))
            target = mock.patch.object(module, "target_of", lambda device: {"USE_PTX": True}, create=True)
            stack.enter_context(target)
        stack.enter_context(mock.patch.object(grouped, "_capability", lambda out: divmod(capability, 10)))
        stack.enter_context(mock.patch("torch_moe_ops.backends.triton.runs_on", lambda device: True))
        biases = (raw.w13_bias, raw.w2_bias)
        for most in (slots.MOST_OF_ONE_LAUNCH, 0):
            with mock.patch.object(slots, "MOST_OF_ONE_LAUNCH", most):
                slots.sort_slots_on_gpu(ids, 0, case.experts)
        p = on_gpu.make_pass(call, sizes, torch.ones_like(x), x, biases)
        on_gpu.run_pass(p, BACKENDS[backend], case.dtype, True, case.bias, case.bias)
        lora = adapters(raw, sizes, x)
        on_gpu.run_forward(p, BACKENDS[backend], lora, case.dtype)
        with mock.patch.object(on_gpu, "FEW_ROWS_BY_SLOT", 0):
            on_gpu.run_forward(p, replace(BACKENDS[backend], rows_by_slot=_Elsewhere), lora, case.dtype)
        on_gpu.run_pass(p, BACKENDS[backend], case.dtype, True, False, False, lora)
        few_ranks = adapters(raw, sizes, x, rank_sums.MOST_RANKS // 2)
        on_gpu.run_pass(p, BACKENDS[backend], case.dtype, True, False, False, few_ranks)
    return found


def adapters(raw: RawWeights, sizes: Sizes, x: torch.Tensor, rank: int = rank_sums.MOST_RANKS) -> Lora:
    """Two of a rank, of which a token has one; all gradients are wanted."""
    given = factors_of(raw, 2, rank, torch.bfloat16)
    ids, scaling = torch.zeros(x.shape[0], dtype=torch.int32), torch.as_tensor(given.scaling)
    lora = Lora.of(LoraArguments(given.a13, given.b13, given.a2, given.b2, scaling, ids), sizes, x)
    for factors in lora:
        if factors is not None:
            factors.want(True, True)
    return lora


Variant = tuple[Any, dict[str, str], dict[str, Any], dict[str, Any]]  # kernel, signature, constants, options


def variants(launched: Iterable[Any]) -> Iterator[Variant]:
    """What is to be compiled for launches, each variant once."""
    seen = set()
    for kernel, args, constants in launched:
        signature = {name: signature_type(value) for name, value in zip(kernel.arg_names, args, strict=False)}
        values = {name: v for name, v in constants.items() if name not in _OPTIONS}
        options = {name: constants[name] for name in _OPTIONS if name in constants}
        key = (kernel.fn.__name__, str(signature), str(values))
        if key not in seen:
            seen.add(key)
            yield kernel, signature, values, options


def compiled(variant: Variant, capability: int) -> CompiledKernel:
    kernel, signature, values, options = variant
    pointers = [i for i, name in enumerate(kernel.arg_names) if signature.get(name, "").startswith("*")]
    aligned = {(i,): [["tt.divisibility", 16]] for i in pointers}
    source = ASTSource(kernel, signature | dict.fromkeys(values, "constexpr"), values, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def main(capability: int, part: int, parts: int) -> None:
    count: Counter[str] = Counter()
    for case, backend in CASES:
        for variant in variants(launches(case, backend, capability)):
            name = variant[0].fn.__name__
            count[name] += 1
            if not (count[name] == 1 or name.startswith("dequantize") or count[name] % parts == part):
                continue
            kernel = compiled(variant, capability)
            assert kernel.asm["cubin"]
            ptx = kernel.asm["ptx"]
            products = [p for p in ("wgmma.mma_async", "tcgen05.mma", "mma.sync") if p in ptx]
            print(name, backend, case.scheme, kernel.metadata.shared, *products)


def list_variants(capability: int) -> None:
    for case, backend in CASES:
        for kernel, *particular in variants(launches(case, backend, capability)):
            print(kernel.fn.__name__, str(particular).replace(" ", ""))


if __name__ == "__main__":
    (main if len(sys.argv) > 2 else list_variants)(*map(int, sys.argv[1:]))
