"""What all ranks of a group must say alike, compared once when a layer is made; an error of one is an error of all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torch_moe_ops.expert_parallel.placement import ExpertPlacement
from torch_moe_ops.prepared.prepared_weights import PreparedWeights

# Of prepared weights: what makes the ranks' shares parts of one layer.
_SHARED: tuple[str, ...] = ("scheme", "act_format", "activation", "weight_policy", "num_experts", "hidden_size")
_SHARED += ("num_shared_experts",)
_SHARED += ("intermediate_size", "router_weight_on_input", "swiglu_alpha", "swiglu_beta", "swiglu_limit")


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Collectives of Python objects travel through the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def gathered(group: Any, device: torch.device, mine: Any) -> list[Any]:
    """The object of every rank, in ascending rank order."""
    found: list[Any] = [None] * dist.get_world_size(group)
    with on_device(device):
        dist.all_gather_object(found, mine, group=group)
    return found


class _Problem(NamedTuple):
    text: str


@contextmanager
def told_to_all(group: Any) -> Iterator[None]:
    """An error inside reaches the other ranks too, which are, or come, in `agreed`."""
    try:
        yield
    except Exception as error:
        gathered(group, torch.device("cpu"), _Problem(f"{type(error).__name__}: {error}"))
        raise


def agreed(group: Any, device: torch.device, mine: Any) -> list[Any]:
    """`gathered`, of ranks that all got so far.

    Raises ValueError: another one did not.
    """
    found = gathered(group, device, mine)
    for rank, one in enumerate(found):
        if isinstance(one, _Problem):
            raise ValueError(f"ExpertParallel: rank {rank} could not make the layer: {one.text}")
    return found


def require_alike(what: str, said: list[Mapping[str, Any]]) -> None:
    """The same ValueError on every rank where one says something else."""
    for name in said[0]:
        values = [one.get(name) for one in said]
        if any(value != values[0] for value in values):
            raise ValueError(f"{what}: {name} must be the same on every rank, got {values}")


def agreed_placement(
    group: Any, w: PreparedWeights, placement: ExpertPlacement | None, settings: Mapping[str, Any]
) -> ExpertPlacement:
    """The placement that all ranks have, after they have been compared; by default each expert once, as w says.

    Raises ValueError, the same on every rank: something is not the same everywhere, or the shares do not fit it.
    """
    mine = {name: getattr(w, name) for name in _SHARED} | dict(settings) | {"placement": placement}
    if settings.get("payload") == "quantized" and w.a1_gscale is not None:
        mine["a1_gscale"] = float(w.a1_gscale)  # a rank reads what the others have quantized
    share = (w.local_expert_offset, w.num_local_experts)
    found = gathered(group, w.device, (mine, share))
    require_alike("ExpertParallel", [said for said, _ in found])
    shares = [share for _, share in found]
    if placement is None:
        placement = _as_prepared(w.num_experts, shares, w.num_shared_experts)
    placement.check_shared(w.num_shared_experts)
    wanted = [(placement.offset(rank), count) for rank, count in enumerate(placement.slots_of_ranks)]
    if shares != wanted or w.num_experts != placement.num_slots:
        raise ValueError(
            f"ExpertParallel: w must be prepared with num_experts={placement.num_slots} and (local_expert_offset, "
            f"local experts) {wanted} on the ranks, got num_experts={w.num_experts} and {shares}"
        )
    return placement


def _as_prepared(num_experts: int, shares: list[tuple[int, int]], shared: int) -> ExpertPlacement:
    """Experts in order, shared ones on every rank; what is no such share is found by the comparison that follows."""
    bounds = [offset - rank * shared for rank, (offset, _) in enumerate(shares)]
    bounds.append(num_experts - len(shares) * shared)
    if bounds != sorted(set(bounds)) or bounds[0] != 0:
        return ExpertPlacement.contiguous(num_experts - (len(shares) - 1) * shared, len(shares), shared)
    behind = tuple(range(bounds[-1], bounds[-1] + shared))
    return ExpertPlacement(tuple((*range(a, b), *behind) for a, b in pairwise(bounds)))
