"""The pairs of token and expert, sorted by expert, and pieces of them that are worked on at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torch_moe_ops.backends.triton_engine.backward_pass import Slots

PIECE_ELEMENTS = 1 << 26  # of the widest result of a piece


class Pairs(NamedTuple):
    """The slots of topk_ids [num_tokens, top_k], those of local experts first, ascending by expert, then by slot.

    order: int64 [num_tokens * top_k]: which slot (token * top_k + j) comes at a place.
    expert: int64, the local expert at a place; the number of experts for foreign ids.
    ends: int64 [num_experts]: places up to and including each expert's.
    host_ends: the same numbers, None where the device may not be waited for (a CUDA graph is being captured).
    """

    order: Tensor
    expert: Tensor
    ends: Tensor
    host_ends: list[int] | None


class Piece(NamedTuple):
    """Consecutive pairs of consecutive experts.

    places: int64 [rows] into the order of Pairs. expert: [rows], counted from the first one of the piece.
    ends: int32 [experts] rows up to and including each expert's; host_ends likewise, or None.
    valid: bool [rows], or None where all rows are. Rows behind ends[-1] are not valid: they belong to other pieces.
    """

    places: Tensor
    expert: Tensor
    ends: Tensor
    host_ends: list[int] | None
    valid: Tensor | None


def sort_slots(topk_ids: Tensor, local_expert_offset: int, num_experts: int) -> Slots:
    """Slots of topk_ids. Does not wait for the device."""
    expert, order = torch.sort(_local(topk_ids, local_expert_offset, num_experts), stable=True)
    order = order.int()
    limits = torch.arange(1, num_experts + 1, device=expert.device, dtype=torch.int32)
    ends = torch.searchsorted(expert, limits, out_int32=True)
    return Slots(order, order // topk_ids.shape[1], expert, ends)


def _local(topk_ids: Tensor, local_expert_offset: int, num_experts: int) -> Tensor:
    """[slots] of the dtype of the ids, num_experts for foreign ones. In few operations: decode pays for each."""
    local = topk_ids.reshape(-1)
    if local_expert_offset:
        local = local - local_expert_offset  # of the smallest numbers it may wrap: far beyond num_experts
    return local.clamp(-1, num_experts).remainder_(num_experts + 1)


def sort_pairs(topk_ids: Tensor, local_expert_offset: int, num_experts: int) -> Pairs:
    """Pairs of topk_ids. Waits for the device, but for a stream that is captured."""
    expert, order = torch.sort(_local(topk_ids, local_expert_offset, num_experts).long(), stable=True)
    ends = torch.searchsorted(expert, torch.arange(1, num_experts + 1, device=expert.device))
    waits = not (topk_ids.is_cuda and torch.cuda.is_current_stream_capturing())
    return Pairs(order, expert, ends, ends.tolist() if waits else None)


def pieces(pairs: Pairs, first: int, last: int, most_rows: int) -> Iterator[Piece]:
    """The pairs of experts first .. last - 1, in pieces of at most `most_rows`.

    Where the device may not be waited for there is one piece with as many rows as there are pairs at all, of which
    those of these experts come first.
    """
    device, ends = pairs.order.device, pairs.ends[first:last]
    if pairs.host_ends is None:
        count = pairs.order.shape[0]
        start = pairs.ends[first - 1] if first else torch.zeros_like(ends[0])
        rows = torch.arange(count, device=device)
        places, of_piece = (rows + start) % count, ends - start
        valid = rows < of_piece[-1]
        expert = torch.where(valid, pairs.expert[places] - first, 0)
        yield Piece(places, expert, of_piece.to(torch.int32), None, valid)
        return
    begin, stop = pairs.host_ends[first - 1] if first else 0, pairs.host_ends[last - 1]
    for row in range(begin, stop, most_rows):
        size = min(most_rows, stop - row)
        places = torch.arange(row, row + size, device=device)
        on_host = [min(max(end - row, 0), size) for end in pairs.host_ends[first:last]]
        of_piece = (ends - row).clamp(0, size).to(torch.int32)
        yield Piece(places, pairs.expert[places] - first, of_piece, on_host, None)
