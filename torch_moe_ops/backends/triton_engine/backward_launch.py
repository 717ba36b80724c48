"""Launches the kernels of a backward pass (gradients/on_gpu.py has the pass)."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_moe_ops.backends.triton_engine.backward import (
    activation_kernel,
    bias_kernel,
    forward_kernel,
    gather_sum_kernel,
)
from torch_moe_ops.backends.triton_engine.backward_pass import Pass
from torch_moe_ops.backends.triton_engine.grouped import grouped_product as product
from torch_moe_ops.backends.triton_engine.plan import target_of
from torch_moe_ops.core.activations import ACTIVATIONS

__all__ = ["activate", "combine", "differentiate", "product", "sums_of_experts"]

_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_ROWS_AT_ONCE = 16  # programs of a multiprocessor, a row each


def differentiate(
    p: Pass,
    z: Tensor,
    u: Tensor,
    dw: Tensor,
    factors: tuple[Tensor, Tensor],
    first: int,
    last: int,
    keeps_h: bool = False,
) -> None:
    """z becomes its gradient, in rows of experts first .. last - 1, and dw that of their routing weights.

    And u the intermediate, as GEMM2 multiplies it, if keeps_h.

    Args:
        z, u: bfloat16 [pairs, rows of w13] and [pairs, intermediate_size], as products gave them.
        dw: float32 [slots], empty where not wanted.
        factors: float32 [experts, 1 or halves] and [experts, 1], what has to multiply z and u.
    """
    call, (bias13, bias2) = p.call, p.biases
    activation_kernel[(_row_programs(z),)](
        z,
        u,
        dw,
        p.slots.order,
        p.slots.expert,
        p.slots.ends,
        call.topk_weights,
        *factors,
        z if bias13 is None else bias13,
        z if bias2 is None else bias2,
        p.grad,
        first,
        last,
        call.topk_ids.shape[1],
        call.swiglu_alpha,
        call.swiglu_beta,
        call.swiglu_limit,
        INTER=p.sizes.intermediate_size,
        H=p.sizes.hidden_size,
        FACTORS=factors[0].shape[1],
        ACTIVATION=call.activation,
        IS_GATED=ACTIVATIONS[call.activation].is_gated,
        HAS_LIMIT=not math.isinf(call.swiglu_limit),
        HAS_BIAS13=bias13 is not None,
        HAS_BIAS2=bias2 is not None,
        WEIGHTED=p.weighted,
        WANTS_WEIGHTS=dw.numel() > 0,
        WRITES_H=keeps_h,
        ROUNDED=_TYPES[call.hidden_states.dtype],
        BLOCK=_row_block(p),
        USE_PTX=target_of(z.device)["USE_PTX"],
    )


def sums_of_experts(rows: Tensor, p: Pass, of_tokens: bool) -> Tensor:
    """float32 [experts, columns]: each expert's rows added up. of_tokens: rows of tokens, times the routing weight."""
    out = torch.empty((p.sizes.num_experts, rows.shape[1]), device=rows.device)
    bias_kernel[p.sizes.num_experts, triton.cdiv(rows.shape[1], 128)](
        rows,
        p.slots.order,
        p.slots.ends,
        p.call.topk_weights,
        out,
        p.call.topk_ids.shape[1],
        N=rows.shape[1],
        OF_TOKENS=of_tokens,
        WEIGHTED=of_tokens and p.weighted,
        BLOCK_M=32,
        BLOCK_N=128,
    )
    return out


def activate(p: Pass, z: Tensor, h: Tensor, factor: float, first: int, last: int) -> None:
    """h becomes the activation of factor * z + bias, in rows of experts first .. last - 1.

    Args:
        z, h: bfloat16 [pairs, rows of w13] and [pairs, intermediate_size].
    """
    call, bias = p.call, p.biases[0]
    forward_kernel[(_row_programs(z),)](
        z,
        h,
        p.slots.expert,
        p.slots.ends,
        z if bias is None else bias,
        first,
        last,
        factor,
        call.swiglu_alpha,
        call.swiglu_beta,
        call.swiglu_limit,
        INTER=p.sizes.intermediate_size,
        ACTIVATION=call.activation,
        IS_GATED=ACTIVATIONS[call.activation].is_gated,
        HAS_LIMIT=not math.isinf(call.swiglu_limit),
        HAS_BIAS=bias is not None,
        ROUNDED=_TYPES[call.hidden_states.dtype],
        BLOCK=_row_block(p),
        USE_PTX=target_of(z.device)["USE_PTX"],
    )


def _row_programs(rows: Tensor) -> int:
    if not rows.is_cuda:
        return 8
    return _ROWS_AT_ONCE * torch.cuda.get_device_properties(rows.device).multi_processor_count


def _row_block(p: Pass) -> int:
    return min(1024, max(128, triton.next_power_of_2(p.sizes.intermediate_size)))


def combine(rows: Tensor, p: Pass, dtype: torch.dtype, of_output: bool = False, factor: float = 1.0) -> Tensor:
    """[tokens, columns]: factor * the rows of each token's local slots added up, ascending, in float32.

    of_output: with the biases of w2, and times the routing weights, where there are some.
    """
    bias = p.biases[1] if of_output else None
    tokens, top_k = p.call.topk_ids.shape
    places = torch.empty_like(p.slots.order)
    places[p.slots.order.long()] = torch.arange(tokens * top_k, dtype=places.dtype, device=places.device)
    out = rows.new_empty((tokens, rows.shape[1]), dtype=dtype)
    block = min(1024, triton.next_power_of_2(rows.shape[1]))
    gather_sum_kernel[tokens, triton.cdiv(rows.shape[1], block)](
        rows,
        places,
        p.slots.ends,
        p.slots.expert,
        p.call.topk_weights,
        rows if bias is None else bias,
        out,
        p.sizes.num_experts,
        factor,
        TOP_K=top_k,
        H=rows.shape[1],
        WEIGHTED=of_output and p.weighted,
        HAS_BIAS=bias is not None,
        BLOCK=block,
        USE_PTX=target_of(out.device)["USE_PTX"],
    )
    return out
