"""Adapters of experts that lie on several ranks: a rank's share of them, and whose a token's is on its way."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from torch_moe_ops.core.activations import is_gated
from torch_moe_ops.core.check import fail
from torch_moe_ops.core.lora_checks import check_factors, check_ids, check_scaling, check_some_given
from torch_moe_ops.expert_parallel.groups import Ranks
from torch_moe_ops.expert_parallel.placement import ExpertPlacement
from torch_moe_ops.prepared.lora import Lora
from torch_moe_ops.prepared.prepared_weights import PreparedWeights
from torch_moe_ops.transports.exchange import ALONE

_OP, _FACTORS = "moe_routed_lora", ("a13", "b13", "a2", "b2")


def share_of_lora(lora: Lora, placement: ExpertPlacement, ranks: Ranks, w: PreparedWeights) -> Lora:
    """A rank's share of adapters whose factors are of all experts, as the router numbers them, and whole.

    Raises: TypeError for what is no Lora, ValueError for factors of another number of experts or another width.
    """
    if not isinstance(lora, Lora):
        raise TypeError(f"ExpertParallel: lora must be a Lora, got {type(lora).__name__}")
    halves, width = 2 if is_gated(w.activation) else 1, w.intermediate_size * ranks.tp_size
    divided = {"b13": (1, halves), "a2": (2, 1)}  # the dimension that has the intermediate size, and how often
    found = {}
    for name in _FACTORS:
        factor = getattr(lora, name)
        if factor is None:
            continue
        if factor.ndim != 3 or factor.shape[0] != placement.num_experts:
            want, got = f"[{placement.num_experts}, ., .], of all experts", tuple(factor.shape)
            raise ValueError(f"ExpertParallel: lora.{name} must have shape {want}, got {got}")
        mine = factor[list(placement.slots[ranks.rank])]
        if name in divided:
            dim, blocks = divided[name]
            if mine.shape[dim] != blocks * width:
                want, got = f"size {blocks * width} in dimension {dim}", tuple(mine.shape)
                raise ValueError(f"ExpertParallel: lora.{name} must have {want}, got shape {got}")
            start = ranks.tp_rank * w.intermediate_size
            of_halves = mine.unflatten(dim, (blocks, width)).narrow(dim + 1, start, w.intermediate_size)
            mine = of_halves.flatten(dim, dim + 1)
        found[name] = mine.to(w.device).contiguous()
    scaling = lora.scaling.to(w.device) if isinstance(lora.scaling, Tensor) else lora.scaling
    return dataclasses.replace(lora, **found, scaling=scaling)


def check_adapters(lora: Lora | None, lora_ids: Tensor | None, hidden_states: Tensor, w: PreparedWeights) -> None:
    """Raises what would leave the other ranks waiting: also what the layer's op refuses, which runs between the two
    exchanges. hidden_states: of this rank; w: its share."""
    if lora is None:
        if lora_ids is not None:
            raise ValueError(f"ExpertParallel: lora must be given with lora_ids, got None{ALONE}")
        return
    if not isinstance(lora, Lora):
        raise TypeError(f"ExpertParallel: lora must be a Lora, got {type(lora).__name__}{ALONE}")
    try:
        _check_share(lora, lora_ids, hidden_states, w)
    except RuntimeError as error:
        raise RuntimeError(f"{error}{ALONE}") from None


def _check_share(lora: Lora, lora_ids: Tensor | None, hidden_states: Tensor, w: PreparedWeights) -> None:
    adapters = 1
    if isinstance(lora.scaling, Tensor):
        check_scaling(_OP, lora.scaling)
        adapters = lora.scaling.shape[0]
    check_ids(_OP, lora_ids, hidden_states.shape[0], adapters, (torch.int32, torch.int64))
    factors = (lora.a13, lora.b13, lora.a2, lora.b2)
    check_some_given(_OP, factors)
    experts, hidden, inter = w.num_local_experts, w.hidden_size, w.intermediate_size
    rows = (2 if is_gated(w.activation) else 1) * inter
    check_factors(_OP, "13", lora.a13, lora.b13, adapters, (experts, rows, hidden))
    check_factors(_OP, "2", lora.a2, lora.b2, adapters, (experts, hidden, inter))
    named = zip((*_FACTORS, "scaling", "ids"), (*factors, lora.scaling, lora_ids), strict=True)
    for name, value in named:
        if isinstance(value, Tensor) and value.device != hidden_states.device:
            fail(_OP, f"lora_{name}", f"be on {hidden_states.device} like hidden_states", value.device)


def with_owners(places: Tensor, weights: Tensor, lora_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Places and weights with one more column: no expert, and each token's adapter in the place of a weight."""
    # float32 has the integers up to 2^24 exactly: larger numbers are nobody's, either way.
    owners = lora_ids[:, None].clamp(-1, 1 << 24).to(torch.float32)
    return torch.cat((places, torch.full_like(places[:, :1], -1)), 1), torch.cat((weights, owners), 1)


def without_owners(ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse, of the rows that came: (ids, weights, each row's adapter, int32)."""
    owners = weights[:, -1].nan_to_num(-1.0, -1.0, -1.0).to(torch.int32)  # rows that stand for no token may be anything
    return ids[:, :-1].contiguous(), weights[:, :-1].contiguous(), owners
