"""From experts as a router names them to the places where they lie, and how often each was asked for."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_moe_ops.transports import launch

NOWHERE = -1


def place(topk_ids: Tensor, first: Tensor, count: Tensor, slots: Tensor, load: Tensor, rank: int) -> Tensor:
    """Places int32 [T, k] of the experts topk_ids [T, k]; `load` counts them.

    Args:
        topk_ids: int32 or int64; an id that is no expert's has no place: -1.
        first, count: int32 [num_experts]: the places of expert e that this rank may choose from are
            slots[first[e] : first[e] + count[e]]. Row t of the call takes number (t + rank) % count[e] of them.
        slots: int32 [places].
        load: int64 [num_experts], grows by the number of times that each expert was asked for.
    """
    if launch.has_kernels(topk_ids.device):
        return launch.place(topk_ids, first, count, slots, load, rank)
    known = (topk_ids >= 0) & (topk_ids < first.shape[0])
    ids = torch.where(known, topk_ids, 0).long()
    load.scatter_add_(0, ids.flatten(), known.flatten().to(load.dtype))
    turn = torch.arange(rank, rank + topk_ids.shape[0], device=topk_ids.device)[:, None] % count[ids].clamp_min(1)
    at = (first[ids] + turn).clamp(0, slots.shape[0] - 1)  # whatever the tables hold, no memory of others is read
    return torch.where(known, slots[at], NOWHERE)
