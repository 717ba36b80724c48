"""Shared experts of transformers models inside the call that runs the routed ones.

A block adds its shared experts to the routed ones, each with weight 1 or with a gate's. That it does so is found by
trying: modules that multiply stand in for both. The block goes on adding, but zero.
"""

from __future__ import annotations

import copy
import logging
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_moe_ops.checkpoints import load_experts
from torch_moe_ops.transformers.modules import ExpertsModule
from torch_moe_ops.weights.raw_weights import RawWeights

_NAMES = ("shared_experts", "shared_expert")
GATE = "shared_expert_gate"
_TOKENS = 4
_log = logging.getLogger(__name__)


class SharedInside(nn.Module):
    """In the place of shared experts that run with the routed ones: nothing to add."""

    nothing: Tensor

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.register_buffer("nothing", like.new_zeros(()), persistent=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """A scalar zero in the dtype of hidden_states."""
        return self.nothing.to(hidden_states.dtype)


@dataclass(frozen=True)
class SharedExperts:
    """Where a block has its shared experts. gate: gives a logit of their weight for each token, None: they weigh 1."""

    block: nn.Module
    name: str
    gate: nn.Module | None

    def replace(self, experts: Any) -> None:
        """Drop them from the block, once `experts` holds them.

        The gate stays the block's, for state_dict and `to`; experts only know it.
        """
        own = next(self.block.get_submodule(self.name).parameters())
        setattr(self.block, self.name, SharedInside(own.detach()))
        experts.__dict__["shared_gate"] = (self.gate,)


def load_with_shared(
    model: nn.Module, found: ExpertsModule, path: str | os.PathLike[str], input_scales: bool
) -> tuple[RawWeights, SharedExperts] | None:
    """A layer's routed experts with its shared ones behind them; None, with a line of the log, where that cannot be."""
    block = model.get_submodule(found.name.rpartition(".")[0])
    name = next((n for n in _NAMES if isinstance(getattr(block, n, None), nn.Module)), None)
    if name is None:
        return None
    try:
        shared = shared_of(block, found.name.rpartition(".")[2], name)
        return load_experts(path, layer=found.layer, input_scales=input_scales, shared_experts=True), shared
    except ValueError as error:
        _log.info("shared experts beside %s run as before: %s", found.name, error)
        return None


@torch.no_grad()
def shared_of(block: nn.Module, experts: str, name: str) -> SharedExperts:
    """The shared experts of a block that does nothing with them but add them to its routed ones.

    Args:
        experts, name: of the block's routed and shared experts.
    Raises ValueError for a block that computes something else, or experts that are divided among ranks.
    """
    if getattr(block.get_submodule(experts), "_is_expert_parallel", False):
        raise ValueError("experts must be on one device, got them divided among ranks")
    own = next(block.get_submodule(name).parameters())
    gate = getattr(block, GATE, None)
    probe = copy.copy(block)
    probe._modules = {**block._modules, experts: _Times(2.0), name: _Times(3.0)}
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, _TOKENS, own.shape[-1], generator=generator).to(own)
    weight = 1.0 if gate is None else torch.sigmoid(gate(hidden))
    given = probe(hidden)
    if not isinstance(given, Tensor) or not torch.allclose(given, 2 * hidden + weight * (3 * hidden), rtol=2e-2):
        how = "as they are" if gate is None else f"times the sigmoid of {GATE}"
        raise ValueError(f"{type(block).__name__} must add its {name} {how} to its routed experts")
    return SharedExperts(block, name, gate)


class _Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states * self.factor
