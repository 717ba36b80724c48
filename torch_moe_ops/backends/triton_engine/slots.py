"""Slots sorted by expert, stable.

Of few tokens in one launch, where every slot counts those that come before it; of many in three, where it does so among
its neighbours, and the slots that an expert has in each block of them are counted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_moe_ops.backends.triton_engine.backward_pass import Slots
from torch_moe_ops.core.schemes import ceil_div, next_power_of_2

MOST = 4096  # slots in one launch: the work grows with their square
MOST_OF_MANY = 1 << 18
_BLOCK, _CHUNK = 16, 256  # slots or experts of a program; slots that it compares them with at once
_NEIGHBOURS = 512  # slots of a block of many, of which each is compared with those before it


@triton.jit
def _local(ids_ptr, slot, slots, first_expert, EXPERTS: tl.constexpr):
    """The local expert of a slot, EXPERTS for foreign ids, more for slots that are not there."""
    expert = tl.load(ids_ptr + slot, mask=slot < slots, other=0) - first_expert
    expert = tl.where((expert >= 0) & (expert < EXPERTS), expert, EXPERTS).to(tl.int32)
    return tl.where(slot < slots, expert, EXPERTS + 1)


@triton.jit(do_not_specialize=["slots", "first_expert"])
def slots_kernel(
    ids_ptr,
    order_ptr,
    token_ptr,
    expert_ptr,
    place_ptr,
    ends_ptr,
    slots,
    first_expert,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The arrays of Slots, of ids [slots]. Grid: cdiv(slots, BLOCK) + cdiv(EXPERTS, BLOCK)."""
    slot_tiles = tl.cdiv(slots, BLOCK)
    tile = tl.program_id(0)
    of_experts = tile >= slot_tiles
    number = (tile - tl.where(of_experts, slot_tiles, 0)) * BLOCK + tl.arange(0, BLOCK)
    own = tl.where(of_experts, number, _local(ids_ptr, number, slots, first_expert, EXPERTS))
    # An expert ends behind all slots of its own.
    limit = tl.where(of_experts, slots, number)
    before = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, slots, CHUNK):
        slot = first + tl.arange(0, CHUNK)
        other = _local(ids_ptr, slot, slots, first_expert, EXPERTS)[None, :]
        comes_first = (other < own[:, None]) | ((other == own[:, None]) & (slot[None, :] < limit[:, None]))
        before += tl.sum(comes_first.to(tl.int32), axis=1)
    if of_experts:
        tl.store(ends_ptr + number, before, mask=number < EXPERTS)
    else:
        real = number < slots
        tl.store(order_ptr + before, number, mask=real)
        tl.store(token_ptr + before, number // TOP_K, mask=real)
        tl.store(expert_ptr + before, own, mask=real)
        tl.store(place_ptr + number, before, mask=real)


def sort_few_slots(topk_ids: Tensor, local_expert_offset: int, num_experts: int) -> Slots:
    """Slots of topk_ids [num_tokens, top_k], contiguous, at most MOST of them."""
    count = topk_ids.numel()
    apart = ceil_div(count, 4) * 4  # kernels are compiled for aligned rows
    space = torch.empty((4, apart), dtype=torch.int32, device=topk_ids.device)
    order, token, expert, place = space[:, :count].unbind()
    ends = torch.empty((num_experts,), dtype=torch.int32, device=topk_ids.device)
    slots_kernel[(ceil_div(count, _BLOCK) + ceil_div(num_experts, _BLOCK),)](
        topk_ids,
        order,
        token,
        expert,
        place,
        ends,
        count,
        local_expert_offset,
        EXPERTS=num_experts,
        TOP_K=topk_ids.shape[1],
        BLOCK=_BLOCK,
        CHUNK=min(_CHUNK, next_power_of_2(count)),
        num_warps=4,
    )
    return Slots(order, token, expert, ends, place)


@triton.jit(do_not_specialize=["slots", "first_expert"])
def count_kernel(
    ids_ptr, counts_ptr, slots, first_expert, EXPERTS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """counts [blocks, BINS]: how many slots of each block an expert has, foreign ones in bin EXPERTS. Grid: blocks."""
    block = tl.program_id(0)
    own = _local(ids_ptr, block * BLOCK + tl.arange(0, BLOCK), slots, first_expert, EXPERTS)
    tl.store(counts_ptr + block * BINS + tl.arange(0, BINS), tl.histogram(own, BINS))


@triton.jit(do_not_specialize=["blocks"])
def starts_kernel(
    counts_ptr,
    starts_ptr,
    ends_ptr,
    blocks,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
):
    """starts [blocks, BINS]: where the first slot of an expert in a block comes; ends. Grid: BINS / BLOCK_E.

    BLOCKS: a power of two, at least `blocks`. ROWS: of counts that are read at once.
    """
    bins = tl.arange(0, BINS)
    total = tl.zeros((BINS,), tl.int32)
    for first in range(0, blocks, ROWS):
        row = first + tl.arange(0, ROWS)
        total += tl.sum(
            tl.load(counts_ptr + row[:, None] * BINS + bins[None, :], mask=(row < blocks)[:, None], other=0), axis=0
        )
    mine = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    start = tl.sum(tl.where(bins[None, :] < mine[:, None], total[None, :], 0), axis=1)
    block = tl.arange(0, BLOCKS)
    at = block[:, None] * BINS + mine[None, :]
    real = (block < blocks)[:, None]
    counts = tl.load(counts_ptr + at, mask=real, other=0)
    tl.store(starts_ptr + at, tl.cumsum(counts, axis=0) - counts + start[None, :], mask=real)
    tl.store(ends_ptr + mine, start + tl.sum(counts, axis=0), mask=mine < EXPERTS)


@triton.jit(do_not_specialize=["slots", "first_expert"])
def places_kernel(
    ids_ptr,
    starts_ptr,
    order_ptr,
    token_ptr,
    expert_ptr,
    place_ptr,
    slots,
    first_expert,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The arrays of Slots besides ends, of ids [slots], ROWS of them a program. starts: of blocks of BLOCK slots."""
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(0) // (BLOCK // ROWS)
    own = _local(ids_ptr, number, slots, first_expert, EXPERTS)
    before = tl.zeros((ROWS,), tl.int32)
    for first in range(0, BLOCK, CHUNK):
        slot = block * BLOCK + first + tl.arange(0, CHUNK)
        other = _local(ids_ptr, slot, slots, first_expert, EXPERTS)[None, :]
        before += tl.sum(((other == own[:, None]) & (slot[None, :] < number[:, None])).to(tl.int32), axis=1)
    real = number < slots
    before += tl.load(starts_ptr + block * BINS + own, mask=real, other=0)
    tl.store(order_ptr + before, number, mask=real)
    tl.store(token_ptr + before, number // TOP_K, mask=real)
    tl.store(expert_ptr + before, own, mask=real)
    tl.store(place_ptr + number, before, mask=real)


def sort_many_slots(topk_ids: Tensor, local_expert_offset: int, num_experts: int) -> Slots:
    """Slots of topk_ids [num_tokens, top_k], contiguous, at most MOST_OF_MANY of them."""
    count, device = topk_ids.numel(), topk_ids.device
    apart, blocks = ceil_div(count, 4) * 4, ceil_div(count, _NEIGHBOURS)
    order, token, expert, place = torch.empty((4, apart), dtype=torch.int32, device=device)[:, :count].unbind()
    ends = torch.empty((num_experts,), dtype=torch.int32, device=device)
    bins = next_power_of_2(num_experts + 2)  # foreign ones, and what is behind the last slot
    counts, starts = torch.empty((2, blocks, bins), dtype=torch.int32, device=device)
    of_ids = (count, local_expert_offset)
    count_kernel[(blocks,)](topk_ids, counts, *of_ids, EXPERTS=num_experts, BINS=bins, BLOCK=_NEIGHBOURS, num_warps=4)
    block_e = min(_BLOCK, bins)
    starts_kernel[(bins // block_e,)](
        counts, starts, ends, blocks, EXPERTS=num_experts, BINS=bins, BLOCKS=next_power_of_2(blocks), BLOCK_E=block_e,
        ROWS=max(1, 8192 // bins), num_warps=4,
    )  # fmt: skip
    places_kernel[(blocks * (_NEIGHBOURS // _BLOCK),)](
        topk_ids, starts, order, token, expert, place, *of_ids, EXPERTS=num_experts, TOP_K=topk_ids.shape[1],
        BINS=bins, BLOCK=_NEIGHBOURS, ROWS=_BLOCK, CHUNK=_CHUNK, num_warps=4,
    )  # fmt: skip
    return Slots(order, token, expert, ends, place)
