"""Both thin products of rows in the order of experts, low_kernel's and outer_kernel's, from one read of them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_moe_ops.backends.triton_engine.backward_pass import Slots
from torch_moe_ops.backends.triton_engine.elements import narrow
from torch_moe_ops.backends.triton_engine.grouped import expert_tiles, has_large_shared, tile_of
from torch_moe_ops.backends.triton_engine.known import Launch
from torch_moe_ops.backends.triton_engine.plan import target_of
from torch_moe_ops.backends.triton_engine.products import dot
from torch_moe_ops.backends.triton_engine.ranks import Ranks, load_ranks, own_ranks, store_ranks
from torch_moe_ops.core.devices import processors_of
from torch_moe_ops.core.schemes import ceil_div, next_power_of_2

MOST_RANKS = 16  # more would not fit beside the rows in shared memory
_TAIL = 64  # rows of a tile with few rows left
_LONG_ROW = 1024


@triton.jit
def low_and_sums_kernel(
    rows_ptr,
    factor_ptr,
    other_ptr,
    ends_ptr,
    token_ptr,
    order_ptr,
    weights_ptr,
    ids_ptr,
    scaling_ptr,
    low_ptr,
    parts_ptr,
    count,
    K: tl.constexpr,
    RANKS: tl.constexpr,
    OF_ADAPTER: tl.constexpr,
    HAS_IDS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    USE_PTX: tl.constexpr,
):
    """low[r] = scaling * rows[r] @ factor[e], as low_kernel has it, of the rows [P, K] of `count` experts, and

    parts[tile] = the sum over a tile's rows of outer(rows[r], other[r]), float32 [tiles, K, RANKS], ascending. other:
    like low, times the routing weight of the row's slot where WEIGHTED. Any number of programs.
    """
    begin, upto, tiles, sizes = expert_tiles(ends_ptr, 0, count, BINS, BLOCK_M)
    total = tl.sum(tiles)
    for tile in range(tl.program_id(0), total, tl.num_programs(0)):
        expert, start, size, inside, _ = tile_of(tile, begin, upto, tiles, sizes, 1)
        factor = factor_ptr + expert.to(tl.int64) * (K * RANKS)
        parts = parts_ptr + tl.full((), K * RANKS, tl.int64) * tile
        if size - inside * BLOCK_M <= TAIL_M:
            _tile(
                rows_ptr, factor, other_ptr, token_ptr, order_ptr, weights_ptr, ids_ptr, scaling_ptr, low_ptr, parts,
                start, size, inside * BLOCK_M, K, RANKS, OF_ADAPTER, HAS_IDS, TRANSPOSED, WEIGHTED, TAIL_M, BLOCK_R,
                BLOCK_K, STAGES, USE_PTX,
            )  # fmt: skip
        else:
            _tile(
                rows_ptr, factor, other_ptr, token_ptr, order_ptr, weights_ptr, ids_ptr, scaling_ptr, low_ptr, parts,
                start, size, inside * BLOCK_M, K, RANKS, OF_ADAPTER, HAS_IDS, TRANSPOSED, WEIGHTED, BLOCK_M, BLOCK_R,
                BLOCK_K, STAGES, USE_PTX,
            )  # fmt: skip


@triton.jit
def _tile(
    rows_ptr, factor_ptr, other_ptr, token_ptr, order_ptr, weights_ptr, ids_ptr, scaling_ptr, low_ptr, parts_ptr, start,
    size, first_row, K: tl.constexpr, RANKS: tl.constexpr, OF_ADAPTER: tl.constexpr, HAS_IDS: tl.constexpr,
    TRANSPOSED: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """One tile: BLOCK_M rows of an expert's `size` that begin at `start`, from `first_row` on."""
    row = first_row + tl.arange(0, BLOCK_M)
    live = row < size
    place = (start + tl.minimum(row, size - 1)).to(tl.int64)  # a number of this expert's: 0 times it is 0
    r = tl.arange(0, BLOCK_R)
    k = tl.arange(0, BLOCK_K)
    other = load_ranks(other_ptr, place, r, RANKS)
    if WEIGHTED:
        other *= tl.load(weights_ptr + tl.load(order_ptr + place)).to(tl.float32)[:, None]
    other = narrow(tl.where(live[:, None], other, 0.0), tl.bfloat16, USE_PTX)
    x = rows_ptr + place[:, None] * K + k[None, :]
    w = factor_ptr + (
        tl.minimum(r, RANKS - 1)[:, None] * K + k[None, :] if TRANSPOSED else k[:, None] * RANKS + r[None, :]
    )
    to = parts_ptr + k[:, None] * RANKS + r[None, :]
    low = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for at in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        inside = at + k < K
        a = tl.load(x) if K % BLOCK_K == 0 else tl.load(x, mask=inside[None, :], other=0.0)
        if TRANSPOSED:
            b = tl.load(w) if K % BLOCK_K == 0 else tl.load(w, mask=inside[None, :], other=0.0)
        elif K % BLOCK_K == 0 and RANKS % BLOCK_R == 0:
            b = tl.load(w)
        else:
            b = tl.load(w, mask=inside[:, None] & (r < RANKS)[None, :], other=0.0)
        low = dot(a, b if TRANSPOSED else b.trans(), low, USE_PTX)
        sums = dot(a.trans(), other.trans(), tl.zeros((BLOCK_K, BLOCK_R), tl.float32), USE_PTX)
        tl.store(to, sums, mask=inside[:, None] & (r < RANKS)[None, :])
        x += BLOCK_K
        w += BLOCK_K if TRANSPOSED else BLOCK_K * RANKS
        to += BLOCK_K * RANKS
    low = own_ranks(low, place, r, token_ptr, ids_ptr, scaling_ptr, RANKS, OF_ADAPTER, HAS_IDS)
    store_ranks(low, low_ptr, place, r, live, RANKS, USE_PTX)


@triton.jit
def add_parts_kernel(
    parts_ptr,
    ends_ptr,
    out_ptr,
    count,
    K: tl.constexpr,
    RANKS: tl.constexpr,
    RANKS_FIRST: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    USE_PTX: tl.constexpr,
):
    """out[e] = the sum of the parts of expert e's tiles of BLOCK_M rows, ascending; zeros where it has none.

    Grid: (count, cdiv(K, BLOCK_K)). out: [E, K, RANKS], [E, RANKS, K] where RANKS_FIRST.
    """
    expert = tl.program_id(0)
    _, upto, tiles, _ = expert_tiles(ends_ptr, 0, count, BINS, BLOCK_M)
    own = tl.arange(0, BINS) == expert
    last = tl.sum(tl.where(own, upto, 0))
    first = last - tl.sum(tl.where(own, tiles, 0))
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    r = tl.arange(0, BLOCK_R)
    kept = (k < K)[:, None] & (r < RANKS)[None, :]
    at = k[:, None] * RANKS + r[None, :]
    total = tl.zeros((BLOCK_K, BLOCK_R), tl.float32)
    for tile in range(first, last):
        total += tl.load(parts_ptr + tl.full((), K * RANKS, tl.int64) * tile + at, mask=kept, other=0.0)
    out = out_ptr + expert.to(tl.int64) * (K * RANKS)
    if RANKS_FIRST:
        at = r[None, :] * K + k[:, None]
    tl.store(out + at, narrow(total, out_ptr.dtype.element_ty, USE_PTX), mask=kept)


def serves(rows: Tensor, ranks: int) -> bool:
    """Whether low_and_sums takes rows on this device beside so many ranks."""
    return ranks <= MOST_RANKS and has_large_shared(rows)


def low_and_sums(
    rows: Tensor, factor: Tensor, transposed: bool, ranks: Ranks, low: Tensor, other: Tensor, slots: Slots,
    weights: Tensor | None, ranks_first: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Fills `low` as ranks.low_rows does, of all experts, and returns what ranks.outer_sums does of rows and `other`.

    Args:
        rows: bfloat16 [places, K], contiguous, where `serves` says so.
    """
    experts, (places, k), width = slots.ends.shape[0], rows.shape, low.shape[2]
    # Tiles of more rows leave fewer parts, but rows that are read as 128 values at a time come faster.
    block_m, block_k = (256, 128) if k >= _LONG_ROW else (512, 64)
    parts = torch.empty((places // block_m + experts, k, width), dtype=torch.float32, device=rows.device)
    out = torch.empty((experts, width, k) if ranks_first else (experts, k, width), dtype=dtype, device=rows.device)
    own = (ranks.scaling.shape[0], ranks.ids is not None, transposed, weights is not None, ranks_first)
    uses_ptx = target_of(out.device)["USE_PTX"]
    low_and_parts, add_parts = _launches(k, width, experts, block_m, block_k, *own, uses_ptx)
    weights, ids = other if weights is None else weights, slots.token if ranks.ids is None else ranks.ids
    sources = (rows, factor, other, slots.ends, slots.token, slots.order, weights, ids, ranks.scaling)
    low_and_parts(
        low_and_sums_kernel, (processors_of(out.device) if out.is_cuda else 2,), (*sources, low, parts), experts
    )
    add_parts(add_parts_kernel, (experts, ceil_div(k, 128)), (parts, slots.ends, out), experts)
    return out


@lru_cache
def _launches(
    k: int, ranks: int, experts: int, block_m: int, block_k: int, adapters: int, has_ids: bool, transposed: bool,
    weighted: bool, ranks_first: bool, uses_ptx: bool,
) -> tuple[Launch, Launch]:  # fmt: skip
    """Of low_and_sums_kernel and add_parts_kernel."""
    shared: dict[str, Any] = {"K": k, "RANKS": ranks, "BINS": max(32, next_power_of_2(experts)), "BLOCK_M": block_m}
    shared |= {"BLOCK_R": max(16, next_power_of_2(ranks)), "USE_PTX": uses_ptx}
    low_and_parts = Launch(
        num_warps=8,
        OF_ADAPTER=ranks // adapters,
        HAS_IDS=has_ids,
        TRANSPOSED=transposed,
        WEIGHTED=weighted,
        TAIL_M=_TAIL,
        BLOCK_K=block_k,
        STAGES=3,
        **shared,
    )
    return low_and_parts, Launch(RANKS_FIRST=ranks_first, BLOCK_K=128, **shared)
