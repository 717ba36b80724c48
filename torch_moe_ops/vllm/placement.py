"""Expert maps: which of the global experts are on this rank, and where."""

from __future__ import annotations

import torch
from torch import Tensor


def first_of_range(expert_map: Tensor | None) -> int | None:
    """Global id of the rank's first expert where its experts follow each other; None where they do not.

    expert_map: [global experts], place on this rank or -1; None: all experts are here.
    """
    if expert_map is None:
        return 0
    places = expert_map.tolist()
    ids = [i for i, place in enumerate(places) if place >= 0]
    is_range = bool(ids) and [places[i] for i in range(ids[0], ids[0] + len(ids))] == list(range(len(ids)))
    return ids[0] if is_range else None


def places_of(topk_ids: Tensor, expert_map: Tensor) -> Tensor:
    """Global ids -> places on this rank, -1 for experts of other ranks and for ids below 0."""
    known = expert_map[topk_ids.clamp_min(0).long()]
    return torch.where(topk_ids < 0, -1, known).to(torch.int32)
