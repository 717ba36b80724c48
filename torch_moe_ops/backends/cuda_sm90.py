"""The `cuda_sm90` backend: CUDA kernels for Hopper GPUs, in csrc/cuda/sm90 (docs/hopper.md).

Weights lie in a layout of their own. Two kernels read it: `decode`, one persistent launch for few tokens, and
`prefill`, grouped GEMMs for many. Shapes alone decide between them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from torch_moe_ops import _ext
from torch_moe_ops.backends import _sm90_layout as tiled
from torch_moe_ops.backends.registry import (
    Backend,
    Layout,
    Problem,
    Requirement,
    Sizes,
    Spec,
    available,
    formats,
    one_of,
    register,
)
from torch_moe_ops.ops.call import ExpertsCall
from torch_moe_ops.quant import nvfp4
from torch_moe_ops.raw_weights import RawWeights
from torch_moe_ops.schemes import Scheme

FORMATS: dict[str, tuple[str, ...]] = {"nvfp4": ("nvfp4", "none")}
CAPABILITY = (9, 0)
MAX_EXPERTS = 1024  # that one thread block sorts
DECODE_MAX_SLOTS = 2048  # tokens * top_k that the decode kernel takes (csrc/cuda/sm90/decode_plan.h)


def decode_max_tokens(num_experts: int, top_k: int) -> int:
    """Up to this many tokens the decode kernel runs, beyond it the prefill kernels; num_experts are the local ones."""
    return min(max(8, 8 * num_experts // top_k), DECODE_MAX_SLOTS // top_k)


def specs(scheme: Scheme, sizes: Sizes) -> dict[str, Spec]:
    """Shapes and dtypes of w13, w2 and their scales: bytes, tile by tile."""
    experts, hidden, inter, gated = sizes.num_experts, sizes.hidden_size, sizes.intermediate_size, sizes.is_gated
    table: dict[str, Spec] = {}
    for name, rows, k, halved in (("w13", (2 if gated else 1) * inter, hidden, gated), ("w2", hidden, inter, False)):
        codes, scales = tiled.shapes(experts, rows, k, halved)
        table[name] = ((codes,), (torch.uint8,))
        table[f"{name}_scale"] = ((scales,), (torch.uint8,))
    return table


def prepare(raw: RawWeights) -> dict[str, Tensor]:
    """Tiles in the order of the tensor cores' operands, expert by expert, on raw's device.

    Raises ValueError for block scales that are negative or NaN.
    """
    tensors = {}
    for name, gated in (("w13", raw.is_gated), ("w2", False)):
        scale = getattr(raw, f"{name}_scale")
        tensors[name] = tiled.pack_codes(getattr(raw, name), gated)
        tensors[f"{name}_scale"] = tiled.pack_scales(scale, gated, f"{name}_scale")
    return tensors


def restore(scheme: Scheme, tensors: Mapping[str, Tensor], sizes: Sizes) -> dict[str, Tensor]:
    """Inverse of prepare, bit for bit."""
    hidden, inter, gated = sizes.hidden_size, sizes.intermediate_size, sizes.is_gated
    restored = {}
    for name, rows, k, halved in (("w13", (2 if gated else 1) * inter, hidden, gated), ("w2", hidden, inter, False)):
        restored[name] = tiled.unpack_codes(tensors[name], rows, k, halved)
        restored[f"{name}_scale"] = tiled.unpack_scales(tensors[f"{name}_scale"], rows, k, halved)
    return restored


def run(call: ExpertsCall, out: Tensor) -> None:
    """Fill `out` [num_tokens, hidden_size] (bfloat16, float16 or float32, contiguous) from a checked call."""
    tokens, top_k = call.topk_ids.shape
    run_kernel(call, out, decode=tokens <= decode_max_tokens(call.w13.shape[0], top_k))


def run_kernel(call: ExpertsCall, out: Tensor, decode: bool) -> None:
    """`run` on the kernel that the caller names."""
    x, quantize = call.hidden_states, call.act_format == "nvfp4"
    packed = call.hidden_states_scale is not None
    if call.hidden_states_scale is not None:
        # Code times block scale has six significant bits: bfloat16 holds it, and the alphas have the rest.
        x = nvfp4.dequantize(x, call.hidden_states_scale).to(torch.bfloat16)
    torch.ops.moeq_C.experts_sm90(
        out,
        x,
        call.topk_ids,
        call.topk_weights,
        call.w13,
        call.w13_scale,
        call.g1_alphas,
        call.w13_bias,
        call.w2,
        call.w2_scale,
        call.g2_alphas,
        call.w2_bias,
        call.a1_gscale,
        call.a2_gscale,
        quantize and not packed,
        quantize,
        call.activation,
        call.swiglu_alpha,
        call.swiglu_beta,
        call.swiglu_limit,
        call.local_expert_offset,
        call.router_weight_on_input,
        decode,
    )


def _extension_reason() -> str | None:
    return _ext.cuda_extension_reason() or None


def _capability_reason(problem: Problem) -> str | None:
    if problem.device != "cuda" or problem.capability in (None, CAPABILITY):
        return None
    return (
        f"compute capability must be {CAPABILITY}, whose instructions the kernels are made of, got {problem.capability}"
    )


def _dtype_reason(problem: Problem) -> str | None:
    if problem.dtype in (None, torch.bfloat16):
        return None
    return f"dtype must be torch.bfloat16, in which the tensor cores get every operand, got {problem.dtype}"


def _hidden_size_reason(problem: Problem) -> str | None:
    if problem.hidden_size % tiled.TILE == 0:
        return None
    return f"hidden_size must be a multiple of {tiled.TILE}, got {problem.hidden_size}"


def _experts_reason(problem: Problem) -> str | None:
    if problem.num_local_experts <= MAX_EXPERTS:
        return None
    return f"num_local_experts must be at most {MAX_EXPERTS}, got {problem.num_local_experts}"


def _notes(problem: Problem) -> str:
    """Which kernel a number of tokens would get, and where another backend may be faster."""
    slower = "triton may be faster at 6 to 24 tokens an expert (docs/hopper.md)"
    if problem.top_k is None:
        most = decode_max_tokens(problem.num_local_experts, 1)
        return f"decode kernel up to about {most} / top_k tokens, prefill kernels beyond; {slower}"
    most = decode_max_tokens(problem.num_local_experts, problem.top_k)
    return f"decode kernel up to {most} tokens, prefill kernels beyond; {slower}"


register(
    Backend(
        name="cuda_sm90",
        layout=Layout("cuda_sm90_tiles_v1", specs, lambda scheme, w2_shape: w2_shape[2] * tiled.TILE),
        requires=(
            one_of("device", "cuda"),
            Requirement(_capability_reason),
            available(_extension_reason),
            formats(FORMATS),
            one_of("weight_policy", "exact"),
            Requirement(_dtype_reason),
            Requirement(_hidden_size_reason),
            Requirement(_experts_reason),
        ),
        prepare=prepare,
        restore=restore,
        run=run,
        hidden_dtypes=(torch.bfloat16,),
        notes=_notes,
    )
)
