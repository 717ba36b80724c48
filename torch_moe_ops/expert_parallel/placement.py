"""ExpertPlacement: which expert lies in which slot of which rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from torch_moe_ops.weights.raw_weights import RawWeights
from torch_moe_ops.weights.sharding import take_experts

NEAREST, SPREAD = "nearest", "spread"


@dataclass(frozen=True)
class ExpertPlacement:
    """A map from experts, as the router numbers them, to slots of ranks; an expert may lie on several ranks.

    Args:
        slots: slots[rank][slot] is the expert that lies there. Every expert of 0 ... the largest must lie somewhere,
            on a rank at most once. Ranks may have different numbers of slots, but at least one.
        replicas: which of several replicas, in ascending order of their ranks, a token goes to. "nearest": the one on
            the token's own rank; where it has none, number (rank modulo their count). "spread": row t of a call on a
            rank takes number (t + rank) modulo their count, so that they share the load evenly.

    Raises ValueError, TypeError for a map that is none.
    """

    slots: tuple[tuple[int, ...], ...]
    replicas: str = NEAREST

    def __post_init__(self) -> None:
        object.__setattr__(self, "slots", tuple(tuple(int(e) for e in rank) for rank in self.slots))
        if self.replicas not in (NEAREST, SPREAD):
            raise ValueError(f"ExpertPlacement: replicas must be {NEAREST!r} or {SPREAD!r}, got {self.replicas!r}")
        if not self.slots or not all(self.slots):
            raise ValueError(f"ExpertPlacement: slots must have a rank, and a slot on every rank, got {self.slots}")
        for rank, experts in enumerate(self.slots):
            if len(set(experts)) < len(experts):
                raise ValueError(f"ExpertPlacement: slots of rank {rank} must name an expert once, got {experts}")
        named = {e for rank in self.slots for e in rank}
        missing = sorted(set(range(max(named) + 1)) - named)
        if missing or min(named) < 0:
            what = f"experts {missing[:8]} nowhere" if missing else f"expert {min(named)}"
            raise ValueError(f"ExpertPlacement: slots must name every expert from 0 on, got {what}")

    @staticmethod
    def contiguous(num_experts: int, world_size: int, num_shared_experts: int = 0) -> ExpertPlacement:
        """Every expert once, ranks in order, the first ones with one more of a remainder.

        num_shared_experts: how many of them, the last ones, lie on every rank instead, behind its others.
        """
        routed = num_experts - num_shared_experts
        if not 1 <= world_size <= routed:
            raise ValueError(f"ExpertPlacement: world_size must be in 1 ... {routed} (experts), got {world_size}")
        base, more = divmod(routed, world_size)
        starts = [rank * base + min(rank, more) for rank in range(world_size + 1)]
        shared = tuple(range(routed, num_experts))
        return ExpertPlacement(tuple((*range(a, b), *shared) for a, b in pairwise(starts)))

    @property
    def world_size(self) -> int:
        return len(self.slots)

    @cached_property
    def num_experts(self) -> int:
        """Experts as the router counts them."""
        return 1 + max(max(rank) for rank in self.slots)

    @property
    def slots_of_ranks(self) -> tuple[int, ...]:
        return tuple(len(rank) for rank in self.slots)

    @property
    def num_slots(self) -> int:
        """Slots of all ranks: the experts that the ops of the layer count, `num_experts` of `prepare`."""
        return sum(self.slots_of_ranks)

    def offset(self, rank: int) -> int:
        """The number of the rank's first slot: `local_expert_offset` of `prepare`."""
        return sum(self.slots_of_ranks[:rank])

    @property
    def has_replicas(self) -> bool:
        return self.num_slots > self.num_experts

    def check_shared(self, num_shared_experts: int) -> None:
        """Raises ValueError unless the slots of every rank end with the shared experts, the last ones."""
        shared = tuple(range(self.num_experts - num_shared_experts, self.num_experts))
        for rank, experts in enumerate(self.slots):
            if num_shared_experts and (experts[-num_shared_experts:] != shared or len(experts) == num_shared_experts):
                text = f"end with the shared experts {list(shared)}, behind others"
                raise ValueError(f"ExpertPlacement: slots of rank {rank} must {text}, got {list(experts)}")

    def places(self, expert: int) -> list[int]:
        """The slots of all ranks, numbered through, in which an expert lies; ascending."""
        return [place for place, e in enumerate(e for rank in self.slots for e in rank) if e == expert]

    def rank_of(self, place: int) -> int:
        """The rank of a slot, of those that are numbered through."""
        return next(rank for rank in range(self.world_size) if place < self.offset(rank + 1))

    def nearest(self, expert: int, rank: int) -> int:
        """The place of the replica that is nearest to a rank, as the class says."""
        places = self.places(expert)
        own = [place for place in places if self.rank_of(place) == rank]
        return own[0] if own else places[rank % len(places)]

    def tables(self, rank: int) -> dict[str, Tensor]:
        """`first`, `count`, `slots` of `moeq::ep_place` for the tokens of a rank."""
        every = [self.places(e) for e in range(self.num_experts)]
        first = [sum(len(p) for p in every[:e]) for e in range(self.num_experts)]
        count = [len(places) for places in every]
        if self.replicas == NEAREST:
            first = [
                at + places.index(self.nearest(e, rank))
                for e, (at, places) in enumerate(zip(first, every, strict=True))
            ]
            count = [1] * self.num_experts
        values = {"first": first, "count": count, "slots": [place for places in every for place in places]}
        return {name: torch.tensor(value, dtype=torch.int32) for name, value in values.items()}

    def share(self, raw: RawWeights, rank: int) -> RawWeights:
        """The experts of a rank, in the order of its slots, of `raw`, which holds all of them in the router's order.

        Raises ValueError for another number of experts, or slots that do not end with raw's shared experts.
        """
        if raw.num_experts != self.num_experts:
            raise ValueError(f"ExpertPlacement: raw must hold {self.num_experts} experts, got {raw.num_experts}")
        self.check_shared(raw.num_shared_experts)
        return take_experts(raw, self.slots[rank])


def as_placement(placement: ExpertPlacement | Sequence[Sequence[int]]) -> ExpertPlacement:
    """Of plain slots with the default rule."""
    if isinstance(placement, ExpertPlacement):
        return placement
    return ExpertPlacement(tuple(tuple(rank) for rank in placement))
