"""Last launch: out[t] = sum over j, ascending, of weight[t, j] * y[t, j], in float32."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_moe_ops.backends.triton_engine.dependent import wait_for_previous_kernel
from torch_moe_ops.backends.triton_engine.elements import narrow


@triton.jit
def _slot(y_row, n, mine, H: tl.constexpr, SPECULATE: tl.constexpr):
    if SPECULATE:
        y = tl.where(mine, tl.load(y_row + n, mask=n < H, other=0.0), 0.0)
    else:
        y = tl.load(y_row + n, mask=n < tl.where(mine, H, 0), other=0.0)
    return y


@triton.jit
def combine_kernel(
    y_ptr,
    ids_ptr,
    weights_ptr,
    out_ptr,
    num_slots,
    num_experts,
    expert_offset,
    TOP_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SPECULATE: tl.constexpr,
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (tokens, cdiv(H, BLOCK)).

    y: float32 [SPLIT_K, T * top_k, H], parts to add; what it holds for slots of foreign experts is ignored.

    WEIGHTED: False where the router weight went on the input.
    SPECULATE: read a slot without waiting to know whether it is foreign: sooner, but more bytes where many are.
    """
    wait_for_previous_kernel(PDL)
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    # Unrolled, so that the loads of all slots are in flight together.
    for j in tl.static_range(TOP_K):
        slot = token * TOP_K + j
        local = tl.load(ids_ptr + slot) - expert_offset
        mine = (local >= 0) & (local < num_experts)
        y = _slot(y_ptr + slot * H, n, mine, H, SPECULATE)
        for part in tl.static_range(1, SPLIT_K):
            y += _slot(y_ptr + (part * num_slots + slot) * H, n, mine, H, SPECULATE)
        if WEIGHTED:
            # The weight of a foreign slot may be anything, NaN included.
            weight = tl.load(weights_ptr + slot)
            y = y * tl.where(mine, weight, 0.0)
        acc += y
    tl.store(out_ptr + token * H + n, narrow(acc, out_ptr.dtype.element_ty, USE_PTX), mask=n < H)
