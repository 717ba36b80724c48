"""Products with the thin side of adapters: rows times their expert's factor, and what gradients of factors add up."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_moe_ops.backends.triton_engine.backward_pass import Slots
from torch_moe_ops.backends.triton_engine.elements import narrow
from torch_moe_ops.backends.triton_engine.grouped import expert_tiles, has_large_shared, sum_products, tile_of
from torch_moe_ops.backends.triton_engine.known import Launch
from torch_moe_ops.backends.triton_engine.plan import target_of
from torch_moe_ops.backends.triton_engine.products import dot
from torch_moe_ops.core.devices import processors_of
from torch_moe_ops.core.schemes import ceil_div, next_power_of_2

_PROGRAMS = 4  # of a multiprocessor, which its shared memory holds
_ROWS = 128  # of a tile, of many rows
_MOST_RANKS = 64  # that a tile has
_K, _K_OF_FEW = 64, 256  # of a row at a time; few rows wait for memory more often than they multiply


@triton.jit
def low_kernel(
    rows_ptr,
    index_ptr,
    factor_ptr,
    ends_ptr,
    token_ptr,
    order_ptr,
    ids_ptr,
    scaling_ptr,
    out_ptr,
    first,
    count,
    K: tl.constexpr,
    RANKS: tl.constexpr,
    OF_ADAPTER: tl.constexpr,
    HAS_IDS: tl.constexpr,
    CHUNK: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    GATHER: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    USE_PTX: tl.constexpr,
):
    """out[r] = scaling * rows[index[r]] @ factor[e], of the rows r of `count` experts from `first`.

    out: bfloat16 [P, 2, RANKS], the numbers, then what rounding took of them.

    factor: [E, K, RANKS], or .T of [E, RANKS, K] where TRANSPOSED. scaling: float32 [adapters], OF_ADAPTER ranks each.
    HAS_IDS: zeros but in the ranks of ids[token[r]]. CHUNK: [slots, chunks, 2, CHUNK] instead, by order[r], zeros
    beyond the last. The rest: grouped_kernel.
    """
    rank_tiles: tl.constexpr = (RANKS + BLOCK_R - 1) // BLOCK_R
    begin, upto, tiles, sizes = expert_tiles(ends_ptr, first, count, BINS, BLOCK_M)
    total = tl.sum(tiles) * rank_tiles
    for tile in range(tl.program_id(0), total, tl.num_programs(0)):
        expert, start, size, inside, rank_tile = tile_of(tile, begin, upto, tiles, sizes, rank_tiles)
        factor = factor_ptr + (first + expert).to(tl.int64) * (K * RANKS)
        if size - inside * BLOCK_M <= TAIL_M:
            _low_tile(
                rows_ptr, index_ptr, factor, token_ptr, order_ptr, ids_ptr, scaling_ptr, out_ptr, start, size,
                inside * BLOCK_M, rank_tile, K, RANKS, OF_ADAPTER, HAS_IDS, CHUNK, TRANSPOSED, GATHER, TAIL_M, BLOCK_R,
                BLOCK_K, STAGES, USE_PTX,
            )  # fmt: skip
        else:
            _low_tile(
                rows_ptr, index_ptr, factor, token_ptr, order_ptr, ids_ptr, scaling_ptr, out_ptr, start, size,
                inside * BLOCK_M, rank_tile, K, RANKS, OF_ADAPTER, HAS_IDS, CHUNK, TRANSPOSED, GATHER, BLOCK_M, BLOCK_R,
                BLOCK_K, STAGES, USE_PTX,
            )  # fmt: skip


@triton.jit
def _low_tile(
    rows_ptr, index_ptr, factor_ptr, token_ptr, order_ptr, ids_ptr, scaling_ptr, out_ptr, start, size, first_row,
    rank_tile, K: tl.constexpr, RANKS: tl.constexpr, OF_ADAPTER: tl.constexpr, HAS_IDS: tl.constexpr,
    CHUNK: tl.constexpr, TRANSPOSED: tl.constexpr, GATHER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """One tile of low_kernel."""
    r = rank_tile * BLOCK_R + tl.arange(0, BLOCK_R)
    acc, place, live = sum_products(
        rows_ptr, index_ptr, factor_ptr, start, size, first_row, r, K, RANKS, TRANSPOSED, GATHER, BLOCK_M, BLOCK_R,
        BLOCK_K, STAGES, USE_PTX,
    )  # fmt: skip
    acc = own_ranks(acc, place, r, token_ptr, ids_ptr, scaling_ptr, RANKS, OF_ADAPTER, HAS_IDS)
    if CHUNK:
        chunks: tl.constexpr = (RANKS + CHUNK - 1) // CHUNK
        slot = tl.load(order_ptr + place).to(tl.int64)
        out = out_ptr + (slot * (chunks * 2 * CHUNK))[:, None] + (r // CHUNK * (2 * CHUNK) + r % CHUNK)[None, :]
        kept = live[:, None] & (r < chunks * CHUNK)[None, :]
        acc = tl.where((r < RANKS)[None, :], acc, 0.0)  # beyond it, sums of the last rank came
        high = narrow(acc, tl.bfloat16, USE_PTX)
        tl.store(out, high, mask=kept)
        tl.store(out + CHUNK, narrow(acc - high.to(tl.float32), tl.bfloat16, USE_PTX), mask=kept)
    else:
        store_ranks(acc, out_ptr, place, r, live, RANKS, USE_PTX)


@triton.jit
def own_ranks(
    low, place, r, token_ptr, ids_ptr, scaling_ptr, RANKS: tl.constexpr, OF_ADAPTER: tl.constexpr, HAS_IDS: tl.constexpr
):
    """low times the scaling of ranks r, OF_ADAPTER of them each; zeros in ranks of others where HAS_IDS."""
    low *= tl.load(scaling_ptr + r // OF_ADAPTER, mask=r < RANKS, other=0.0)[None, :]
    if HAS_IDS:
        own = tl.load(ids_ptr + tl.load(token_ptr + place))
        low = tl.where(own[:, None] == (r // OF_ADAPTER)[None, :], low, 0.0)
    return low


@triton.jit
def store_ranks(low, out_ptr, place, r, live, RANKS: tl.constexpr, USE_PTX: tl.constexpr):
    """In out bfloat16 [P, 2, RANKS]: numbers, then what rounding took of them."""
    kept = live[:, None] & (r < RANKS)[None, :]
    out = out_ptr + place[:, None] * (2 * RANKS) + r[None, :]
    high = narrow(low, tl.bfloat16, USE_PTX)
    tl.store(out, high, mask=kept)
    tl.store(out + RANKS, narrow(low - high.to(tl.float32), tl.bfloat16, USE_PTX), mask=kept)


@triton.jit
def load_ranks(low_ptr, place, r, RANKS: tl.constexpr):
    """What store_ranks wrote, float32; zeros beyond RANKS."""
    low = low_ptr + place[:, None] * (2 * RANKS) + r[None, :]
    high = tl.load(low, mask=(r < RANKS)[None, :], other=0.0).to(tl.float32)
    return high + tl.load(low + RANKS, mask=(r < RANKS)[None, :], other=0.0).to(tl.float32)


@triton.jit
def outer_kernel(
    rows_ptr,
    token_ptr,
    low_ptr,
    order_ptr,
    weights_ptr,
    ends_ptr,
    out_ptr,
    W: tl.constexpr,
    RANKS: tl.constexpr,
    RANKS_FIRST: tl.constexpr,
    GATHER: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
    USE_PTX: tl.constexpr,
):
    """out[e] = the sum over the rows r of expert e of outer(rows[r], low[r]), ascending.

    Grid: (cdiv(W, BLOCK_W), E, cdiv(RANKS, BLOCK_R)). rows: bfloat16 [*, W], by token[r] where GATHER. low: as
    low_kernel leaves it, times the routing weight of the row's slot where WEIGHTED. out: [E, W, RANKS], or
    [E, RANKS, W] where RANKS_FIRST; zeros for an expert without rows.
    """
    expert = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    r = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    begin = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    acc = tl.zeros((BLOCK_W, BLOCK_R), tl.float32)
    for at in tl.range(begin, end, BLOCK_M, num_stages=STAGES):
        row = at + tl.arange(0, BLOCK_M)
        live = row < end
        place = tl.minimum(row, end - 1).to(tl.int64)  # a number of this expert's: 0 times it is 0 where others are NaN
        source = tl.load(token_ptr + place).to(tl.int64) if GATHER else place
        wide = tl.load(rows_ptr + source[:, None] * W + n[None, :], mask=(n < W)[None, :], other=0.0)
        thin = load_ranks(low_ptr, place, r, RANKS)
        if WEIGHTED:
            thin *= tl.load(weights_ptr + tl.load(order_ptr + place)).to(tl.float32)[:, None]
        thin = narrow(tl.where(live[:, None], thin, 0.0), tl.bfloat16, USE_PTX)
        acc = dot(wide.trans(), thin.trans(), acc, USE_PTX)
    kept = (n < W)[:, None] & (r < RANKS)[None, :]
    if RANKS_FIRST:
        out = out_ptr + expert.to(tl.int64) * (W * RANKS) + r[None, :] * W + n[:, None]
    else:
        out = out_ptr + expert.to(tl.int64) * (W * RANKS) + n[:, None] * RANKS + r[None, :]
    tl.store(out, narrow(acc, out_ptr.dtype.element_ty, USE_PTX), mask=kept)


class Ranks(NamedTuple):
    """Whose ranks these are: scaling float32 [adapters], side by side; ids int32 [tokens], each token's, or None."""

    scaling: Tensor
    ids: Tensor | None


def low_rows(
    rows: Tensor, index: Tensor | None, factor: Tensor, slots: Slots, transposed: bool, ranks: Ranks,
    first: int, count: int, out: Tensor, chunk: int = 0,
) -> None:  # fmt: skip
    """scaling * rows @ factor of the places of experts first .. first + count - 1, in `out`; zeros in others' ranks.

    Args:
        rows: bfloat16 [R, K], contiguous; index: int32 [P], which row stands at a place; None: R = P.
        factor: bfloat16 [experts, K, adapters * r], [experts, adapters * r, K] where transposed; contiguous.
        out: bfloat16 [P, 2, adapters * r], contiguous: the numbers, then what rounding took of them.
        chunk: a power of two; out is [slots, chunks, 2, chunk] by slot.
    """
    k, width = rows.shape[1], factor.shape[1 if transposed else 2]
    programs = processors_of(out.device) * _PROGRAMS if out.is_cuda else 2
    few, uses_ptx = slots.order.shape[0] <= 32 * slots.ends.shape[0], target_of(out.device)["USE_PTX"]
    own = (k, width, ranks.scaling.shape[0], ranks.ids is not None, chunk)
    launch = _low_launch(*own, transposed, index is not None, count, few, uses_ptx)
    ids = slots.token if ranks.ids is None else ranks.ids
    sources = (rows, slots.token if index is None else index, factor, slots.ends, slots.token, slots.order)
    launch(low_kernel, (programs,), (*sources, ids, ranks.scaling, out), first, count)


@lru_cache(maxsize=1024)  # of as many pieces of experts as numbers of tokens give
def _low_launch(
    k: int, ranks: int, adapters: int, has_ids: bool, chunk: int, transposed: bool, gathers: bool, count: int,
    few: bool, uses_ptx: bool,
) -> Launch:  # fmt: skip
    return Launch(
        K=k,
        RANKS=ranks,
        OF_ADAPTER=ranks // adapters,
        HAS_IDS=has_ids,
        CHUNK=chunk,
        TRANSPOSED=transposed,
        GATHER=gathers,
        BINS=max(32, next_power_of_2(count)),
        BLOCK_M=64 if few else _ROWS,
        TAIL_M=16 if few else 64,
        BLOCK_R=min(_MOST_RANKS, max(16, chunk, next_power_of_2(ranks))),
        BLOCK_K=_K_OF_FEW if few else _K,
        STAGES=3,
        USE_PTX=uses_ptx,
    )


def outer_sums(
    rows: Tensor, gathers: bool, low: Tensor, slots: Slots, weights: Tensor | None, ranks_first: bool,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """rows[e].T @ low[e], of each expert's rows: [experts, W, ranks], [experts, ranks, W] if ranks_first.

    Args:
        rows: bfloat16 [places, W], of tokens where `gathers`; low: as low_rows leaves it; both contiguous.
        weights: float32 [slots], which multiply low; None: nothing does.
        dtype: of the result; sums are float32.
    """
    experts, width, ranks = slots.ends.shape[0], rows.shape[1], low.shape[2]
    shape = (experts, ranks, width) if ranks_first else (experts, width, ranks)
    out = torch.empty(shape, dtype=dtype, device=rows.device)
    block_r, block_w = min(_MOST_RANKS, max(16, next_power_of_2(ranks))), 256 if has_large_shared(rows) else 128
    uses_ptx = target_of(out.device)["USE_PTX"]
    launch = _outer_launch(width, ranks, ranks_first, gathers, weights is not None, block_w, block_r, uses_ptx)
    grid = ceil_div(width, block_w), experts, ceil_div(ranks, block_r)
    tensors = (rows, slots.token, low, slots.order, low if weights is None else weights, slots.ends, out)
    launch(outer_kernel, grid, tensors)
    return out


@lru_cache
def _outer_launch(
    width: int, ranks: int, ranks_first: bool, gathers: bool, weighted: bool, block_w: int, block_r: int, uses_ptx: bool
) -> Launch:
    return Launch(
        num_warps=block_w // 32,
        W=width,
        RANKS=ranks,
        RANKS_FIRST=ranks_first,
        GATHER=gathers,
        WEIGHTED=weighted,
        BLOCK_M=64,
        BLOCK_W=block_w,
        BLOCK_R=block_r,
        STAGES=3,
        USE_PTX=uses_ptx,
    )
