"""Slots of few tokens sorted by expert, in one launch: every slot counts those that come before it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_moe_ops.backends.triton_engine.backward_pass import Slots
from torch_moe_ops.core.schemes import ceil_div, next_power_of_2

MOST = 4096  # slots: the work grows with their square
_BLOCK, _CHUNK = 16, 256  # slots or experts of a program; slots that it compares them with at once


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
