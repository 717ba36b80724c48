"""Which rows an expert gets, and which tile a GEMM program works on: on the device, sizes from shapes alone.

The table is int32 [FIELDS, max_tiles] plus a tail; a tile is BLOCK_TOKENS rows of one expert; tiles
of nobody, behind the others or between two experts, have expert -1. Rows are numbered in the order of experts, inside
an expert in the order of slots, where slot = token * top_k + j.
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
MANY_SLOTS = 512  # from here on tiles may have gaps


def max_tiles(num_slots: int, num_experts: int, block_tokens: int) -> int:
    """The most tiles that any routing can need."""
    return min(num_slots, num_slots // block_tokens + num_experts)


def many_slots(num_slots: int, num_experts: int, block_tokens: int) -> bool:
    """Whether tiles are numbered with gaps, one an expert at most: where that needs no larger table."""
    return num_slots >= MANY_SLOTS and num_slots // block_tokens + num_experts <= num_slots


@triton.jit
def _local(ids_ptr, slot, num_slots, num_experts, expert_offset):
    """The local experts of slots, and which of them are local at all."""
    local = tl.load(ids_ptr + slot, mask=slot < num_slots, other=-1) - expert_offset
    return local, (local >= 0) & (local < num_experts) & (slot < num_slots)


@triton.jit
def _place_few(
    ids_ptr, expert, num_slots, num_experts, expert_offset, BLOCK_TOKENS: tl.constexpr, CHUNK: tl.constexpr,
    BINS: tl.constexpr,
):  # fmt: skip
    """(first row, rows, first tile, number of the next expert's first tile, rows of all): tiles without gaps."""
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for begin in range(0, num_slots, CHUNK):
        local, valid = _local(ids_ptr, begin + tl.arange(0, CHUNK), num_slots, num_experts, expert_offset)
        counts += tl.histogram(tl.where(valid, local, 0), BINS, mask=valid)
    tiles = (counts + (BLOCK_TOKENS - 1)) // BLOCK_TOKENS
    start = tl.sum(tl.where(bins < expert, counts, 0))
    first = tl.sum(tl.where(bins < expert, tiles, 0))
    rows = tl.sum(tl.where(bins == expert, counts, 0))
    end = first + (rows + (BLOCK_TOKENS - 1)) // BLOCK_TOKENS
    return start, rows, first, end, tl.sum(counts)


@triton.jit
def _place_many(
    ids_ptr, expert, num_slots, num_experts, expert_offset, BLOCK_TOKENS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """As _place_few, with gaps: an expert's first tile depends on the rows before it, not on how they are split.

    first = start // BLOCK_TOKENS + expert leaves each expert before room for a tile that is not full. Two comparisons
    a slot cost a fraction of a histogram's votes.
    """
    before = tl.zeros((CHUNK,), tl.int32)
    own = tl.zeros((CHUNK,), tl.int32)
    every = tl.zeros((CHUNK,), tl.int32)
    for begin in range(0, num_slots, CHUNK):
        local, valid = _local(ids_ptr, begin + tl.arange(0, CHUNK), num_slots, num_experts, expert_offset)
        before += (valid & (local < expert)).to(tl.int32)
        own += (valid & (local == expert)).to(tl.int32)
        every += valid.to(tl.int32)
    start = tl.sum(before)
    rows = tl.sum(own)
    return start, rows, start // BLOCK_TOKENS + expert, (start + rows) // BLOCK_TOKENS + expert + 1, tl.sum(every)


@triton.jit
def _write_tiles(table_ptr, expert, first, count, end, start, rows, num_tiles_max, WIDTH: tl.constexpr):
    """The expert's tiles, and unused ones from first + count up to `end`."""
    for begin in range(first, end, WIDTH):
        i = begin + tl.arange(0, WIDTH)
        used = i < first + count
        entry = table_ptr + i
        tl.store(entry + EXPERT * num_tiles_max, tl.where(used, expert, -1), mask=i < end)
        tl.store(entry + FIRST * num_tiles_max, tl.where(used, first, 0), mask=i < end)
        tl.store(entry + COUNT * num_tiles_max, tl.where(used, count, 0), mask=i < end)
        tl.store(entry + START * num_tiles_max, tl.where(used, start, 0), mask=i < end)
        tl.store(entry + ROWS * num_tiles_max, tl.where(used, rows, 0), mask=i < end)


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
    MANY: tl.constexpr,
):
    """One program an expert: count everybody's slots, then write this expert's rows and tiles.

    Every program counts for itself: reading the ids again costs less than waiting for another kernel. Where ids change
    meanwhile, the table is wrong and may have holes, but nothing is written outside of it or of the rows.
    MANY: `many_slots`.
    """
    if MANY:
        start, rows, first, end, total = _place_many(
            ids_ptr, expert, num_slots, num_experts, expert_offset, BLOCK_TOKENS, CHUNK
        )
    else:
        start, rows, first, end, total = _place_few(
            ids_ptr, expert, num_slots, num_experts, expert_offset, BLOCK_TOKENS, CHUNK, BINS
        )
    if expert == 0:
        tl.store(table_ptr + 5 * num_tiles_max, total)
    end = tl.where(expert == num_experts - 1, num_tiles_max, end)
    count = (rows + (BLOCK_TOKENS - 1)) // BLOCK_TOKENS
    _write_tiles(table_ptr, expert, first, count, end, start, rows, num_tiles_max, BINS)
    if rows > 0:
        for begin in range(0, num_slots, CHUNK):
            slot = begin + tl.arange(0, CHUNK)
            local, valid = _local(ids_ptr, slot, num_slots, num_experts, expert_offset)
            mine = valid & (local == expert)
            rank = tl.cumsum(mine.to(tl.int32), 0) - 1
            tl.store(row_slot_ptr + start + rank, slot, mask=mine & (start + rank < num_slots))
            start += tl.sum(mine.to(tl.int32))
