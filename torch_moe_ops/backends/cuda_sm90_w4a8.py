"""The `cuda_sm90_packed` and `cuda_sm90_folded` backends: NVFP4 and MXFP4 weights on fp8 activations, on Hopper.

One backend a weight policy, as each has a layout of its own (csrc/cuda/sm90/layout/w4a8_layout.h); the kernels are
the same: grouped GEMMs made for many tokens, and for very few the decode kernel. docs/numerics.md
says what the policies round, docs/hopper.md how exact the tensor cores' sums are.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from torch_moe_ops.backends.registry import Backend, Requirement, formats, one_of, register
from torch_moe_ops.backends.sm90 import packed_scales
from torch_moe_ops.backends.sm90 import w4a8_layout as tiled
from torch_moe_ops.backends.sm90.byte_formats import matrices, sizes_of
from torch_moe_ops.backends.sm90.common import NEEDS, check_device
from torch_moe_ops.core.call import ExpertsCall, for_kernels
from torch_moe_ops.core.kernel_facts import Sm90Few, Sm90W4a8, own_of
from torch_moe_ops.core.layout import Layout, Sizes, Spec
from torch_moe_ops.core.problem import Problem
from torch_moe_ops.core.schemes import Scheme
from torch_moe_ops.weights.raw_weights import RawWeights

_own = own_of["experts_sm90_w4a8"]
# Up to so many tokens are for the decode kernel, where it takes the layer.
DECODE_TOKENS = Sm90Few.MAX_TOKENS
# Of `packed`: up to so many, while the experts of all slots have no more than so many values of w2, where an expert is
# small, and where it is large; of large ones that are long up to one. Beyond, prefill kernels are mostly faster (ten
# sizes, benchmarks/results/h200_early_inputs.jsonl).
PACKED_TOKENS, PACKED_VALUES, LONG_EXPERT = 12, (105_000_000, 185_000_000), 2560
PREFILL = "prefill kernels on fp8 tensor cores"
NOTES = f"decode kernel up to {{}} tokens, while its buffers fit an SM, then {PREFILL}"
MAX_SIZE = Sm90W4a8.MAX_K  # hidden and intermediate
PACKED, FOLDED = "cuda_sm90_packed", "cuda_sm90_folded"


def specs(folded: bool, scheme: Scheme, sizes: Sizes) -> dict[str, Spec]:
    """Shapes and dtypes of w13, w2 and their scales; codes in bytes, tile by tile."""
    table: dict[str, Spec] = {}
    experts = sizes.num_experts
    for name, rows, k, _ in matrices(sizes):
        tile_bytes = tiled.FP8_BYTES if folded else tiled.PACKED_BYTES
        table[name] = ((tiled.codes_shape(experts, rows, k, tile_bytes),), (torch.uint8,))
        if folded:
            padded = rows if name == "w13" else sizes.hidden_size
            table[f"{name}_scale"] = (((experts, padded, 1),), (torch.float32,))
        else:
            table[f"{name}_scale"] = (
                (tiled.strip_shape(experts, rows, k, packed_scales.BY_SCHEME[scheme.name]),),
                (torch.uint8,),
            )
    return table


def prepare(folded: bool, raw: RawWeights) -> dict[str, Tensor]:
    """Tiles in the order of the tensor cores' operands, expert by expert, on raw's device.

    Raises ValueError for block scales that are negative or NaN, or that no byte stands for (packed_scales.py).
    """
    lay = tiled.fold if folded else tiled.pack
    tensors = {}
    for name, rows, _, gated in matrices(sizes_of(raw)):
        codes, scale = lay(getattr(raw, name), getattr(raw, f"{name}_scale"), rows, gated, name)
        tensors[name] = codes
        tensors[f"{name}_scale"] = scale[:, : raw.hidden_size].contiguous() if folded and name == "w2" else scale
    return tensors


def restore_packed(scheme: Scheme, tensors: Mapping[str, Tensor], sizes: Sizes) -> dict[str, Tensor]:
    """Inverse of prepare, bit for bit."""
    restored = {}
    for name, _, k, gated in matrices(sizes):
        if name not in tensors:
            continue
        rows = sizes.hidden_size if name == "w2" else (2 if gated else 1) * sizes.intermediate_size
        restored[name], restored[f"{name}_scale"] = tiled.unpack(
            tensors[name], tensors[f"{name}_scale"], rows, k, gated, packed_scales.BY_SCHEME[scheme.name]
        )
    return restored


def restore_folded(scheme: Scheme, tensors: Mapping[str, Tensor], sizes: Sizes) -> dict[str, Tensor]:
    """Raises ValueError: many pairs of 4-bit code and block scale round to one e4m3 weight."""
    raise ValueError(
        f"restore: backend must not be {FOLDED!r}: its weights are rounded to e4m3, and the codes and block scales "
        f"that they were made of are gone; prepare with weight_policy='packed', or keep the raw weights"
    )


def decode_folded(tensors: Mapping[str, Tensor], sizes: Sizes) -> dict[str, Tensor]:
    """w13 and w2 float32 [E, rows, K]: e4m3 weights times the powers of two of their rows."""
    found = {}
    for name, _, k, gated in matrices(sizes):
        if name not in tensors:
            continue
        rows = sizes.hidden_size if name == "w2" else (2 if gated else 1) * sizes.intermediate_size
        codes = tiled.untile_fp8(tensors[name], rows, k, gated)
        scale = tensors[f"{name}_scale"].unflatten(1, (2 if gated else 1, -1))[:, :, : rows // (2 if gated else 1)]
        found[name] = codes.float() * scale.flatten(1, 2)
    return found


def run(weights: str, call: ExpertsCall, out: Tensor, decode_tokens: int = 0) -> None:
    """Fill `out` [num_tokens, hidden_size] (bfloat16, float16 or float32, contiguous) from a checked call.

    Args:
        weights: one of SM90_WEIGHTS, as csrc/cuda/sm90/problem/tiled_problem.h says.
        decode_tokens: up to so many are for the decode kernel, where it takes the layer.
    """
    check_device(call)
    own = _own({"weights": weights, "decode_tokens": decode_tokens})
    torch.ops.moeq_C.experts_sm90_w4a8(out, *for_kernels(call), *own)


def packed_tokens(hidden_size: int, intermediate_size: int, top_k: int) -> int:
    """Up to so many tokens are for the decode kernel under `packed`."""
    if hidden_size % tiled.TILE_K != 0:
        return 0  # gpt-oss' sizes; of no other such model is the time known
    values = hidden_size * intermediate_size
    large = values >= Sm90W4a8.LARGE_VALUES
    if large and intermediate_size >= LONG_EXPERT:
        return 1
    most = PACKED_VALUES[large] // max(top_k * values, 1)
    return min(max(most, 2 if large else 1), PACKED_TOKENS)


def run_packed(call: ExpertsCall, out: Tensor) -> None:
    """`run` of 4-bit codes under `packed`."""
    sizes = call.hidden_states.shape[1], call.w2.shape[2] * tiled.TILE_K  # of an expert, with padding
    run("packed", call, out, packed_tokens(*sizes, call.topk_ids.shape[1]))


def sizes_reason(problem: Problem) -> str | None:
    largest = max(problem.hidden_size, problem.intermediate_size)
    if largest <= MAX_SIZE:
        return None
    return f"hidden_size and intermediate_size must be at most {MAX_SIZE}, got {largest}"


def bits_of(folded: bool, scheme: str) -> str:
    """Of a weight with its share of block scales; explained problems may have any scheme."""
    kind = packed_scales.BY_SCHEME.get(scheme, packed_scales.NVFP4)
    return "8" if folded else f"{4 + 8 / kind.block:g}"


def _note(folded: bool, problem: Problem) -> str:
    bits = f"{bits_of(folded, problem.scheme)} bits a weight"
    if folded:
        return f"{NOTES.format(DECODE_TOKENS)}, {bits}"
    padded = tiled.TILE_K * tiled.tiles(problem.intermediate_size, tiled.TILE_K)
    most = packed_tokens(problem.hidden_size, padded, problem.top_k or 1)
    if most == 0:
        return f"{PREFILL}, {bits}"
    return (
        f"decode kernel for few tokens, then {PREFILL}, {bits}"
        if problem.top_k is None
        else f"{NOTES.format(most)}, {bits}"
    )


def _register(name: str, policy: str) -> Backend:
    folded = policy == "folded"
    layout = Layout(
        f"{name}_tiles_v1",
        partial(specs, folded),
        lambda scheme, w2_shape: w2_shape[2] * tiled.TILE_K,
        pads_hidden=True,
    )
    return register(
        Backend(
            name=name,
            layout=layout,
            requires=(
                *NEEDS,
                formats({"nvfp4": ("fp8",), "mxfp4": ("fp8",)}),
                one_of("weight_policy", policy),
                Requirement(sizes_reason),
            ),
            prepare=partial(prepare, folded),
            restore=restore_folded if folded else restore_packed,
            decode=decode_folded if folded else None,
            run=partial(run, "rows", decode_tokens=DECODE_TOKENS) if folded else run_packed,
            hidden_dtypes=(torch.bfloat16,),
            notes=partial(_note, folded),
        )
    )


_register(PACKED, "packed")
_register(FOLDED, "folded")
