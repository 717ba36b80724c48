"""Which experts of a layer lie on the host, and which on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.weights.raw_weights import RawWeights
from torch_moe_ops.weights.sharding import take_experts


@dataclass(frozen=True)
class Split:
    """Every expert once: in slots 0 ... on the device, and in those behind on the host, each side in ascending order.

    Args:
        num_experts: of the layer, shared ones included.
        host: the experts on the host.
    """

    num_experts: int
    host: tuple[int, ...]

    @cached_property
    def device(self) -> tuple[int, ...]:
        return tuple(sorted(set(range(self.num_experts)) - set(self.host)))

    def tables(self) -> dict[str, Tensor]:
        """`first`, `count`, `slots` of `moeq::ep_place`: the place of expert e is its slot."""
        first = torch.arange(self.num_experts, dtype=torch.int32, device="cpu")
        slots = torch.empty_like(first)
        slots[list(self.device + self.host)] = first
        return {"first": first, "count": torch.ones_like(first), "slots": slots}

    def share(self, raw: RawWeights, experts: tuple[int, ...]) -> RawWeights:
        """`experts` of a layer's weights, none of which is shared to a routed call."""
        return take_experts(dataclasses.replace(raw, num_shared_experts=0), experts)


def split_of(raw: RawWeights, host_experts: Any, load: Tensor | Sequence[int] | None) -> Split:
    """As HostExperts is asked.

    Args:
        host_experts: ids, or how many: then those that `load` has least of, the last ones without it.
        load: [num_experts] counts, with a number.

    Raises: TypeError, ValueError naming what was required and what came.
    """
    routed = raw.num_experts - raw.num_shared_experts
    if isinstance(host_experts, int) and not isinstance(host_experts, bool):
        if not 0 <= host_experts <= routed:
            raise ValueError(f"HostExperts: host_experts must be in 0 ... {routed} (experts), got {host_experts}")
        return Split(raw.num_experts, coldest(load, host_experts, routed))
    if not isinstance(host_experts, Sequence) or isinstance(host_experts, str):
        raise TypeError(f"HostExperts: host_experts must be a number or ids, got {type(host_experts).__name__}")
    if load is not None:
        raise ValueError(f"HostExperts: load must be None where host_experts names ids, got it with {host_experts}")
    return Split(raw.num_experts, checked_ids(host_experts, routed))


def checked_ids(experts: Sequence[int], routed: int) -> tuple[int, ...]:
    """Ascending. Raises ValueError for what is no routed expert, or there twice."""
    ids = tuple(sorted(int(e) for e in experts))
    if len(set(ids)) < len(ids) or (ids and not 0 <= ids[0] <= ids[-1] < routed):
        text = f"be ids in 0 ... {routed - 1} (routed experts), each once"
        raise ValueError(f"HostExperts: host_experts must {text}, got {list(experts)}")
    return ids


def coldest(load: Tensor | Sequence[int] | None, n: int, routed: int) -> tuple[int, ...]:
    """The n routed experts with the least load, of equal ones the later; ascending."""
    counts = torch.zeros(routed, device="cpu") if load is None else torch.as_tensor(load, device="cpu")
    if counts.ndim != 1 or counts.shape[0] < routed:
        raise ValueError(f"HostExperts: load must be [{routed}] counts (experts), got {tuple(counts.shape)}")
    values = counts[:routed].tolist()
    return tuple(sorted(sorted(range(routed), key=lambda e: (values[e], -e))[:n]))
