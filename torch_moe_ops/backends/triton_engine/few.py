"""A layer's products for few rows of an expert, from weights in the tiles of "cuda_sm90" as they are packed.

A tile of weights is decoded in registers and multiplied there, for 16 rows at a time: nothing of an expert that nobody
visits is read, and no decoded weight is written.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_moe_ops.backends.triton_engine.activations import activate_gated, activate_plain
from torch_moe_ops.backends.triton_engine.backward_pass import Pass
from torch_moe_ops.backends.triton_engine.dequantize_tiles import as_read, kind_of, tile_rows, tile_values
from torch_moe_ops.backends.triton_engine.elements import narrow
from torch_moe_ops.backends.triton_engine.grouped import Addend, expert_tiles, tile_of
from torch_moe_ops.backends.triton_engine.plan import target_of
from torch_moe_ops.backends.triton_engine.products import dot
from torch_moe_ops.core.schemes import ceil_div, next_power_of_2

_ROWS = 16  # of a tile, as few as a tensor core takes
_TILES = 2  # tiles along K that are decoded at once
_WARPS = 4


@triton.jit
def _with_ranks(
    acc, low_ptr, factor_ptr, place, n, N: tl.constexpr, RANKS: tl.constexpr, STEP: tl.constexpr, USE_PTX: tl.constexpr
):  # fmt: skip
    """acc [columns n, rows] + factor [N, RANKS] @ low[place].T, low as two numbers of bfloat16."""
    for at in tl.range(0, RANKS, STEP, num_stages=1):
        both = tl.arange(0, 2 * STEP)
        r = at + both % STEP
        column = both // STEP * RANKS + r
        low = tl.load(low_ptr + place[:, None] * (2 * RANKS) + column[None, :], mask=(r < RANKS)[None, :], other=0.0)
        kept = (n < N)[:, None] & (r < RANKS)[None, :]
        factor = tl.load(factor_ptr + n[:, None] * RANKS + r[None, :], mask=kept, other=0.0)
        acc = dot(factor, low, acc, USE_PTX)
    return acc


@triton.jit
def _scaled(
    acc, alpha_ptr, bias_ptr, low_ptr, factor_ptr, place, expert, n, N: tl.constexpr, ALPHAS: tl.constexpr,
    UNIT: tl.constexpr, HAS_BIAS: tl.constexpr, RANKS: tl.constexpr, STEP: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """acc [columns n, rows] in real units, with addend and bias."""
    scale = tl.full(n.shape, UNIT, tl.float32)
    if ALPHAS:
        scale *= tl.load(alpha_ptr + expert * ALPHAS + tl.minimum(n, N - 1) // (N // ALPHAS))
    acc *= scale[:, None]
    if RANKS:
        acc = _with_ranks(acc, low_ptr, factor_ptr + expert * (N * RANKS), place, n, N, RANKS, STEP, USE_PTX)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + expert * N + n, mask=n < N, other=0.0)[:, None]
    return acc


@triton.jit
def few_kernel(
    rows_ptr,
    index_ptr,
    w_ptr,
    scale_ptr,
    alpha_ptr,
    bias_ptr,
    ends_ptr,
    low_ptr,
    factor_ptr,
    out_ptr,
    num_experts,
    alpha,
    beta,
    limit,
    SCALE: tl.constexpr,
    IN_ROW: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    ROW_TILES: tl.constexpr,
    ALPHAS: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RANKS: tl.constexpr,
    STEP: tl.constexpr,
    GATHER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    ROUNDED: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILES: tl.constexpr,
    USE_PTX: tl.constexpr,
):
    """y[r] = rows[index[r]] @ W[e].T + low[r] @ factor[e].T + bias[e]; out [P, N] float32 is y where ACTIVATION is "".

    Else its activation, rounded to ROUNDED: out bfloat16 [P, N], N / 2 where GATED. W, and SCALE to UNIT: see
    dequantize_tiles_kernel. low, factor: as in grouped_kernel. bias: float32 [E, N]. Any number of programs.
    """
    tiles_k: tl.constexpr = (K + 63) // 64
    width: tl.constexpr = N // 2 if GATED else N
    begin, upto, tiles, sizes = expert_tiles(ends_ptr, 0, num_experts, BINS, BLOCK_M)
    total = tl.sum(tiles) * ROW_TILES
    for tile in range(tl.program_id(0), total, tl.num_programs(0)):
        local, start, size, inside, row_tile = tile_of(tile, begin, upto, tiles, sizes, ROW_TILES)
        expert = local.to(tl.int64)
        row = inside * BLOCK_M + tl.arange(0, BLOCK_M)
        live = row < size
        place = (start + tl.minimum(row, size - 1)).to(tl.int64)
        source = tl.load(index_ptr + place).to(tl.int64) if GATHER else place
        at_tile = (expert * ROW_TILES + row_tile) * tiles_k
        upper = tl.zeros((32, BLOCK_M), tl.float32)
        lower = tl.zeros((32, BLOCK_M), tl.float32)
        for first in range(0, tiles_k, TILES):
            k = first * 64 + tl.arange(0, 64 * TILES)
            x = tl.load(rows_ptr + source[:, None] * K + k[None, :], mask=live[:, None] & (k < K)[None, :], other=0.0)
            a, b = tile_values(
                w_ptr, scale_ptr, at_tile, first, SCALE, IN_ROW, K, TILES, tl.bfloat16, USE_PTX
            )  # fmt: skip
            if a.dtype != tl.bfloat16:
                a = narrow(a, tl.bfloat16, USE_PTX)
                b = narrow(b, tl.bfloat16, USE_PTX)
            upper = dot(a, x, upper, USE_PTX)
            lower = dot(b, x, lower, USE_PTX)
        above, below = tile_rows(row_tile, N, GATED)
        upper = _scaled(
            upper, alpha_ptr, bias_ptr, low_ptr, factor_ptr, place, expert, above, N, ALPHAS, UNIT, HAS_BIAS, RANKS,
            STEP, USE_PTX,
        )  # fmt: skip
        lower = _scaled(
            lower, alpha_ptr, bias_ptr, low_ptr, factor_ptr, place, expert, below, N, ALPHAS, UNIT, HAS_BIAS, RANKS,
            STEP, USE_PTX,
        )  # fmt: skip
        if GATED and ACTIVATION != "":
            upper = activate_gated(upper, lower, alpha, beta, limit, ACTIVATION, HAS_LIMIT)
        elif ACTIVATION != "":
            upper = activate_plain(upper, ACTIVATION)
            lower = activate_plain(lower, ACTIVATION)
        kept = (above < width)[:, None] & live[None, :]
        out = out_ptr + place[None, :] * width
        value = narrow(upper, ROUNDED, USE_PTX).to(tl.float32)
        tl.store(out + above[:, None], narrow(value, out_ptr.dtype.element_ty, USE_PTX), mask=kept)
        if not GATED:
            kept = (below < width)[:, None] & live[None, :]
            value = narrow(lower, ROUNDED, USE_PTX).to(tl.float32)
            tl.store(out + below[:, None], narrow(value, out_ptr.dtype.element_ty, USE_PTX), mask=kept)


_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def few_rows(
    p: Pass,
    projection: str,
    weight: Tensor,
    scale: Tensor,
    alphas: Tensor | None,
    rows: Tensor,
    index: Tensor | None,
    addend: Addend | None,
    out: Tensor,
) -> None:
    """`out` [pairs, N] of one projection of all experts: float32 for "w2", the intermediate in bfloat16 for "w13".

    Args:
        weight, scale: as dequantize_tiles has them; alphas: float32 [experts, 1 or halves] or None.
        rows, index, addend: as grouped_product has them.
    """
    call, sizes, first = p.call, p.sizes, projection == "w13"
    gated = first and sizes.is_gated
    experts, n, k = weight.shape[0], out.shape[1] * (2 if gated else 1), rows.shape[1]
    kind, unit = kind_of(call.scheme)
    scale = as_read(scale)
    bias = p.biases[0] if first else None  # the other one is added where rows are added up
    most = min(index.shape[0] if index is not None else rows.shape[0], ceil_div(out.shape[0], _ROWS) + experts)
    few_kernel[(max(1, most * weight.shape[1]),)](
        rows,
        out if index is None else index,
        weight.view(torch.int32),
        scale,
        out if alphas is None else alphas,
        out if bias is None else bias,
        p.slots.ends,
        out if addend is None else addend.low,
        out if addend is None else addend.factor,
        out,
        experts,
        call.swiglu_alpha,
        call.swiglu_beta,
        call.swiglu_limit,
        SCALE=kind,
        IN_ROW=scale.shape[-1] // 64,
        N=n,
        K=k,
        GATED=gated,
        ROW_TILES=weight.shape[1],
        ALPHAS=0 if alphas is None else alphas.numel() // experts,
        UNIT=unit,
        HAS_BIAS=bias is not None,
        RANKS=0 if addend is None else addend.ranks,
        STEP=0 if addend is None else addend.step,
        GATHER=index is not None,
        ACTIVATION=call.activation if first else "",
        HAS_LIMIT=not math.isinf(call.swiglu_limit),
        ROUNDED=_TYPES[call.hidden_states.dtype] if first else tl.float32,
        BINS=max(32, next_power_of_2(experts)),
        BLOCK_M=_ROWS,
        TILES=_TILES,
        USE_PTX=target_of(out.device)["USE_PTX"],
        num_warps=_WARPS,
    )
