"""Which rows an expert gets, and which tile a GEMM program works on: on the device, sizes from shapes alone.

The table is int32 [FIELDS, max_tiles] plus a tail; a tile is BLOCK_TOKENS rows of one expert, and tiles
beyond the last one have expert -1. Rows are numbered in the order of experts, inside an expert in the
order of slots, where slot = token * top_k + j.
"""

from __future__ import annotations

import triton
import triton.language as tl

EXPERT = tl.constexpr(0)  # the tile's local expert
FIRST = tl.constexpr(1)  # number of the first tile of that expert
COUNT = tl.constexpr(2)  # how many tiles that expert has
START = tl.constexpr(3)  # first row of that expert
ROWS = tl.constexpr(4)  # how many rows that expert has
FIELDS = 5
TAIL = 1  # number of rows in all


def max_tiles(num_slots: int, num_experts: int, block_tokens: int) -> int:
    """The most tiles that any routing can need."""
    return min(num_slots, num_slots // block_tokens + num_experts)


@triton.jit
def schedule_expert(
    ids_ptr,
    row_slot_ptr,
    table_ptr,
    expert,
    num_slots,
    num_experts,
    expert_offset,
    num_tiles_max,
    BLOCK_TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
):
    """One program an expert: count everybody's slots, then write this expert's rows and tiles.

    Every program counts for itself: reading the ids again costs less than waiting for another kernel.
    """
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for begin in range(0, num_slots, CHUNK):
        slot = begin + tl.arange(0, CHUNK)
        local = tl.load(ids_ptr + slot, mask=slot < num_slots, other=-1) - expert_offset
        mine = (local >= 0) & (local < num_experts) & (slot < num_slots)
        counts += tl.histogram(tl.where(mine, local, 0), BINS, mask=mine)
    tiles = (counts + (BLOCK_TOKENS - 1)) // BLOCK_TOKENS
    start = tl.sum(tl.where(bins < expert, counts, 0))
    first = tl.sum(tl.where(bins < expert, tiles, 0))
    rows = tl.sum(tl.where(bins == expert, counts, 0))
    count = tl.sum(tl.where(bins == expert, tiles, 0))
    if expert == 0:
        tl.store(table_ptr + 5 * num_tiles_max, tl.sum(counts))
        total = tl.sum(tiles)
        for begin in range(total, num_tiles_max, BINS):
            unused = table_ptr + begin + bins
            inside = begin + bins < num_tiles_max
            tl.store(unused, tl.full((BINS,), -1, tl.int32), mask=inside)
            for field in tl.static_range(1, 5):
                tl.store(unused + field * num_tiles_max, tl.zeros((BINS,), tl.int32), mask=inside)
    for begin in range(0, count, BINS):
        i = begin + bins
        entry = table_ptr + first + i
        tl.store(entry + EXPERT * num_tiles_max, tl.zeros_like(i) + expert, mask=i < count)
        tl.store(entry + FIRST * num_tiles_max, tl.zeros_like(i) + first, mask=i < count)
        tl.store(entry + COUNT * num_tiles_max, tl.zeros_like(i) + count, mask=i < count)
        tl.store(entry + START * num_tiles_max, tl.zeros_like(i) + start, mask=i < count)
        tl.store(entry + ROWS * num_tiles_max, tl.zeros_like(i) + rows, mask=i < count)
    if rows > 0:
        for begin in range(0, num_slots, CHUNK):
            slot = begin + tl.arange(0, CHUNK)
            local = tl.load(ids_ptr + slot, mask=slot < num_slots, other=-1) - expert_offset
            mine = (local == expert) & (slot < num_slots)
            rank = tl.cumsum(mine.to(tl.int32), 0) - 1
            tl.store(row_slot_ptr + start + rank, slot, mask=mine)
            start += tl.sum(mine.to(tl.int32))
