"""Experts on their way from one rank to another, as their backends have laid them out."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torch_moe_ops.expert_parallel.agreement import gathered, on_device, require_alike
from torch_moe_ops.expert_parallel.groups import Ranks
from torch_moe_ops.expert_parallel.placement import ExpertPlacement
from torch_moe_ops.prepared.fields import PreparedFields


class Move(NamedTuple):
    """An expert that a rank needs in a slot, and where it is taken from."""

    source: int
    source_slot: int
    target: int
    target_slot: int


def moves(old: ExpertPlacement, new: ExpertPlacement) -> list[Move]:
    """What has to be copied, in the order in which every pair of ranks does it; what stays in its slot is left out."""
    found = []
    for rank, experts in enumerate(new.slots):
        for slot, expert in enumerate(experts):
            place = old.nearest(expert, rank)
            source = old.rank_of(place)
            move = Move(source, place - old.offset(source), rank, slot)
            if (move.source, move.source_slot) != (rank, slot):
                found.append(move)
    return found


def move_experts(ranks: Ranks, w: PreparedFields, old: ExpertPlacement, new: ExpertPlacement) -> None:
    """Bring the tensors of w from one placement to another, in place. Collective.

    Raises ValueError, the same on every rank, before anything has moved.
    """
    for name in ("num_experts", "slots_of_ranks"):
        if getattr(new, name) != getattr(old, name):
            raise ValueError(f"rebalance: {name} must be {getattr(old, name)} as before, got {getattr(new, name)}")
    tensors = list(_by_expert(w).values())
    said = {
        "placement": new,
        "backend": w.backend,
        "layout": w.layout,
        "sizes": [_bytes(t[0]).numel() for t in tensors],
    }
    require_alike("rebalance", gathered(ranks.group, w.device, said))
    new.check_shared(w.num_shared_experts)
    with on_device(w.device):
        _exchange(ranks, tensors, moves(old, new))


def _by_expert(w: PreparedFields) -> dict[str, Tensor]:
    """The tensors that have a part for each expert. The others are of all experts alike."""
    found = {name: t for name, t in w.tensors().items() if t.ndim}
    for name, t in found.items():
        if t.shape[0] != w.num_local_experts or not t.is_contiguous():
            raise ValueError(f"rebalance: {name} must be [{w.num_local_experts} experts, ...], got {tuple(t.shape)}")
    return found


def _exchange(ranks: Ranks, tensors: list[Tensor], todo: list[Move]) -> None:
    """All that comes is received before anything is overwritten: a slot may be a source as well."""
    operations: list[dist.P2POp] = []
    arrived: list[tuple[Tensor, Tensor]] = []
    for move in todo:
        for tensor in tensors:
            if move.source == move.target == ranks.rank:
                arrived.append((tensor[move.target_slot], tensor[move.source_slot].clone()))
            elif move.source == ranks.rank:
                part = _bytes(tensor[move.source_slot])
                operations.append(dist.P2POp(dist.isend, part, group=ranks.group, group_peer=move.target))
            elif move.target == ranks.rank:
                part = torch.empty_like(tensor[move.target_slot])
                arrived.append((tensor[move.target_slot], part))
                operations.append(dist.P2POp(dist.irecv, _bytes(part), group=ranks.group, group_peer=move.source))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    for slot, part in arrived:
        _bytes(slot).copy_(_bytes(part))


def _bytes(t: Tensor) -> Tensor:
    return t.reshape(-1).view(torch.uint8)
