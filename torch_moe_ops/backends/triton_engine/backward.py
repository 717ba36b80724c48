"""What a backward pass does between its products, in one pass over each tensor (gradients/on_gpu.py)."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_moe_ops.backends.triton_engine.elements import narrow


@triton.jit
def _range(ends_ptr, first, last):
    """Rows of experts first .. last - 1: the first one, and the one behind the last."""
    begin = tl.load(ends_ptr + first - 1, mask=first > 0, other=0)
    return begin.to(tl.int64), tl.load(ends_ptr + last - 1).to(tl.int64)


@triton.jit
def _bias_part(grad_ptr, bias_ptr, token, expert, H: tl.constexpr, BLOCK: tl.constexpr):
    """<grad[token], bias[expert]>."""
    acc = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, H, BLOCK):
        n = begin + tl.arange(0, BLOCK)
        grad = tl.load(grad_ptr + token * H + n, mask=n < H, other=0.0).to(tl.float32)
        acc += grad * tl.load(bias_ptr + expert * H + n, mask=n < H, other=0.0)
    return tl.sum(acc)


@triton.jit
def weights_kernel(
    part_ptr,
    dw_ptr,
    order_ptr,
    expert_ptr,
    ends_ptr,
    bias_ptr,
    grad_ptr,
    num_experts,
    top_k,
    H: tl.constexpr,
    PARTS: tl.constexpr,
    BINS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dw[slot] = the sum of part [rows, PARTS] in its row, and <grad[token], bias[expert]> where there is one.

    bias: float32 [E, H]; grad: [tokens, H]. Any number of programs, a row at a time.
    """
    begin, end = _range(ends_ptr, 0, num_experts)
    part = tl.arange(0, BINS)
    for row in range(begin + tl.program_id(0), end, tl.num_programs(0)):
        slot = tl.load(order_ptr + row)
        total = tl.sum(tl.load(part_ptr + row * PARTS + part, mask=part < PARTS, other=0.0))
        if HAS_BIAS:
            expert = tl.load(expert_ptr + row).to(tl.int64)
            total += _bias_part(grad_ptr, bias_ptr, (slot // top_k).to(tl.int64), expert, H, BLOCK)
        tl.store(dw_ptr + slot, total)


@triton.jit
def bias_kernel(
    rows_ptr,
    order_ptr,
    ends_ptr,
    weights_ptr,
    out_ptr,
    top_k,
    N: tl.constexpr,
    OF_TOKENS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out [E, N] float32: the sum of each expert's rows, ascending. Grid: (E, cdiv(N, BLOCK_N)).

    rows: [P, N], or OF_TOKENS [tokens, N], times the routing weight of the slot where WEIGHTED.
    """
    expert = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin, end = _range(ends_ptr, expert, expert + 1)
    acc = tl.zeros((BLOCK_N,), tl.float32)
    for at in range(begin, end, BLOCK_M):
        row = at + tl.arange(0, BLOCK_M)
        source = row
        weight = tl.full((BLOCK_M,), 1.0, tl.float32)
        if OF_TOKENS:
            slot = tl.load(order_ptr + row, mask=row < end, other=0)
            source = (slot // top_k).to(tl.int64)
            if WEIGHTED:
                weight = tl.load(weights_ptr + slot, mask=row < end, other=0.0).to(tl.float32)
        mask = (row < end)[:, None] & (n < N)[None, :]
        values = tl.load(rows_ptr + source[:, None] * N + n[None, :], mask=mask, other=0.0).to(tl.float32)
        acc += tl.sum(tl.where(mask, values * weight[:, None], 0.0), axis=0)
    tl.store(out_ptr + expert.to(tl.int64) * N + n, acc, mask=n < N)


@triton.jit
def gather_sum_kernel(
    rows_ptr,
    place_ptr,
    ends_ptr,
    expert_ptr,
    weights_ptr,
    bias_ptr,
    out_ptr,
    num_experts,
    TOP_K: tl.constexpr,
    H: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    WEIGHTED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BY_SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PTX: tl.constexpr,
):
    """out[t] = the sum of rows[place[t, j]], j ascending, in float32. Grid: (tokens, cdiv(H, BLOCK)).

    Rows of out are OUT_WIDTH elements apart. BY_SLOT: of rows[t * TOP_K + j]. Places from ends[num_experts - 1] on are
    of experts that are not here. HAS_BIAS: the row's expert's, float32 [E, H], is added to it. WEIGHTED: the routing
    weight of the slot multiplies it then.
    """
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    local = tl.load(ends_ptr + num_experts - 1)
    acc = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOP_K):
        place = tl.load(place_ptr + token * TOP_K + j)
        here = (n < H) & (tl.zeros_like(n) + place < local)
        source = token * TOP_K + j if BY_SLOT else place.to(tl.int64)
        row = tl.load(rows_ptr + source * H + n, mask=here, other=0.0).to(tl.float32)
        if HAS_BIAS:
            expert = tl.load(expert_ptr + place).to(tl.int64)
            row += tl.load(bias_ptr + expert * H + n, mask=here, other=0.0)
        if WEIGHTED:
            # The weight of a slot whose expert is not here may be anything, NaN included.
            row *= tl.where(here, tl.load(weights_ptr + token * TOP_K + j).to(tl.float32), 0.0)
        acc += row
    tl.store(out_ptr + token * OUT_WIDTH + n, narrow(acc, out_ptr.dtype.element_ty, USE_PTX), mask=n < H)
