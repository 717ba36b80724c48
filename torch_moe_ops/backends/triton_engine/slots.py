"""Slots sorted by expert: of few tokens in one launch, in which every slot counts those that come before it; of more in
three: blocks of slots count their experts', add up the blocks before, and place each slot."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_moe_ops.backends.triton_engine.backward_pass import Slots
from torch_moe_ops.backends.triton_engine.known import Launch
from torch_moe_ops.core.schemes import ceil_div, next_power_of_2

MOST_OF_ONE_LAUNCH = 4096  # slots: the work grows with their square
_BLOCK, _CHUNK = 16, 256  # slots or experts of a program; slots that it compares them with at once
MOST = 1 << 20  # slots that three launches sort: one program adds up all blocks of an expert
_BLOCK_OF_MANY, _CHUNK_OF_MANY = 256, 32


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


@triton.jit(do_not_specialize=["slots", "first_expert"])
def count_slots_kernel(
    ids_ptr,
    counts_ptr,
    slots,
    first_expert,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """counts int32 [EXPERTS + 1, blocks]: how many slots of a block each expert has, foreign ones last.

    Grid: (blocks,).
    """
    block = tl.program_id(0)
    bins = tl.arange(0, BINS)
    own = _local(ids_ptr, block * BLOCK + tl.arange(0, BLOCK), slots, first_expert, EXPERTS)
    counts = tl.histogram(own, BINS)
    tl.store(counts_ptr + bins * tl.num_programs(0) + block, counts, mask=bins <= EXPERTS)


@triton.jit(do_not_specialize=["blocks"])
def start_slots_kernel(counts_ptr, totals_ptr, blocks, BLOCKS: tl.constexpr):
    """counts become those of the blocks before, totals int32 [EXPERTS + 1] those of all. Grid: (EXPERTS + 1,)."""
    expert = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    counts = tl.load(counts_ptr + expert * blocks + block, mask=block < blocks, other=0)
    tl.store(counts_ptr + expert * blocks + block, tl.cumsum(counts, 0) - counts, mask=block < blocks)
    tl.store(totals_ptr + expert, tl.sum(counts, 0))


@triton.jit(do_not_specialize=["slots", "first_expert"])
def place_slots_kernel(
    ids_ptr,
    before_ptr,
    totals_ptr,
    order_ptr,
    token_ptr,
    expert_ptr,
    place_ptr,
    ends_ptr,
    slots,
    first_expert,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The arrays of Slots from what start_slots_kernel left. Grid: (blocks,)."""
    block = tl.program_id(0)
    if block == 0:
        bins = tl.arange(0, BINS)
        totals = tl.load(totals_ptr + bins, mask=bins < EXPERTS, other=0)
        tl.store(ends_ptr + bins, tl.cumsum(totals, 0), mask=bins < EXPERTS)
    slot = block * BLOCK + tl.arange(0, BLOCK)
    own = _local(ids_ptr, slot, slots, first_expert, EXPERTS)
    real = slot < slots
    # Slots of experts before, in all blocks, and of the same one in this block.
    earlier = tl.zeros((BLOCK, CHUNK), tl.int32)
    for first in range(0, BINS, CHUNK):
        expert = first + tl.arange(0, CHUNK)
        totals = tl.load(totals_ptr + expert, mask=expert < EXPERTS, other=0)
        earlier += tl.where(expert[None, :] < own[:, None], totals[None, :], 0)
    for first in range(0, BLOCK, CHUNK):
        other = block * BLOCK + first + tl.arange(0, CHUNK)
        same = _local(ids_ptr, other, slots, first_expert, EXPERTS)[None, :] == own[:, None]
        earlier += (same & (other[None, :] < slot[:, None])).to(tl.int32)
    before = tl.load(before_ptr + own * tl.num_programs(0) + block, mask=real, other=0)
    place = before + tl.sum(earlier, axis=1)
    tl.store(order_ptr + place, slot, mask=real)
    tl.store(token_ptr + place, slot // TOP_K, mask=real)
    tl.store(expert_ptr + place, own, mask=real)
    tl.store(place_ptr + slot, place, mask=real)


def sort_slots_on_gpu(topk_ids: Tensor, local_expert_offset: int, num_experts: int) -> Slots:
    """Slots of topk_ids [num_tokens, top_k], contiguous, at most MOST of them."""
    count = topk_ids.numel()
    made = [torch.empty((n,), dtype=torch.int32, device=topk_ids.device) for n in (*(count,) * 3, num_experts, count)]
    slots = Slots(*made)
    if count > MOST_OF_ONE_LAUNCH:
        _sort_in_three(topk_ids, local_expert_offset, slots)
        return slots
    launch = _one_launch(num_experts, topk_ids.shape[1], min(_CHUNK, next_power_of_2(count)))
    grid = (ceil_div(count, _BLOCK) + ceil_div(num_experts, _BLOCK),)
    order, token, expert, ends, place = made
    launch(slots_kernel, grid, (topk_ids, order, token, expert, place, ends), count, local_expert_offset)
    return slots


@lru_cache
def _one_launch(num_experts: int, top_k: int, chunk: int) -> Launch:
    return Launch(free=True, EXPERTS=num_experts, TOP_K=top_k, BLOCK=_BLOCK, CHUNK=chunk)


def _sort_in_three(topk_ids: Tensor, local_expert_offset: int, slots: Slots) -> None:
    count, num_experts = topk_ids.numel(), slots.ends.shape[0]
    blocks = ceil_div(count, _BLOCK_OF_MANY)
    counts = torch.empty((num_experts + 1, blocks), dtype=torch.int32, device=topk_ids.device)
    totals = torch.empty((num_experts + 1,), dtype=torch.int32, device=topk_ids.device)
    count_slots, start_slots, place_slots = _three_launches(num_experts, topk_ids.shape[1], next_power_of_2(blocks))
    count_slots(count_slots_kernel, (blocks,), (topk_ids, counts), count, local_expert_offset)
    start_slots(start_slots_kernel, (num_experts + 1,), (counts, totals), blocks)
    order, token, expert, ends, place = slots
    assert place is not None
    tensors = (topk_ids, counts, totals, order, token, expert, place, ends)
    place_slots(place_slots_kernel, (blocks,), tensors, count, local_expert_offset)


@lru_cache
def _three_launches(num_experts: int, top_k: int, blocks: int) -> tuple[Launch, Launch, Launch]:
    """Of count_slots_kernel, start_slots_kernel and place_slots_kernel. blocks: at most, a power of 2."""
    own: dict[str, Any] = {
        "EXPERTS": num_experts,
        "BINS": max(256, next_power_of_2(num_experts + 2)),
        "BLOCK": _BLOCK_OF_MANY,
    }
    place_slots = Launch(num_warps=8, free=True, TOP_K=top_k, CHUNK=_CHUNK_OF_MANY, **own)
    return Launch(free=True, **own), Launch(free=True, BLOCKS=max(128, blocks)), place_slots
