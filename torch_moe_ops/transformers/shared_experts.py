"""Shared experts of transformers models inside the call that runs the routed ones.

A block adds its shared experts to the routed ones, each with weight 1 or with a gate's. That it does so is found by
trying: modules that multiply stand in for both. So is it that both have one activation. The block goes on adding, but
zero.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_moe_ops.checkpoints import load_experts
from torch_moe_ops.core.schemes import FLOATS
from torch_moe_ops.transformers.modules import ExpertsModule, module_activation
from torch_moe_ops.weights.raw_weights import RawWeights

_NAMES = ("shared_experts", "shared_expert")
GATE = "shared_expert_gate"
_TOKENS = 4
# Activations are compared at so many gates and ups, beyond where models clamp them.
_VALUES, _LARGEST = 512, 24.0
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

        The gate stays the block's, for state_dict and `to`; experts ask the block for it, where an adapter may wrap it.
        """
        own = next(self.block.get_submodule(self.name).parameters())
        setattr(self.block, self.name, SharedInside(own.detach()))
        experts.__dict__["shared_gate_of"] = (None if self.gate is None else self.block,)


def block_of(model: nn.Module, found: ExpertsModule) -> nn.Module:
    """The block around experts. Raises ValueError where its shared experts are inside the experts that it has."""
    block = model.get_submodule(found.name.rpartition(".")[0])
    for name in _NAMES:
        if isinstance(getattr(block, name, None), SharedInside):
            text = "be beside them, got it inside experts that were attached before (load the model again)"
            raise ValueError(f"attach_experts: {name} of {found.name} must {text}")
    return block


def load_with_shared(
    model: nn.Module, found: ExpertsModule, path: str | os.PathLike[str], input_scales: bool
) -> tuple[RawWeights, SharedExperts] | None:
    """A layer's routed experts with its shared ones behind them; None, with a line of the log, where that cannot be."""
    block = block_of(model, found)
    name = next((n for n in _NAMES if isinstance(getattr(block, n, None), nn.Module)), None)
    if name is None:
        return None
    try:
        shared = shared_of(block, found.name.rpartition(".")[2], name)
        _check_function(block.get_submodule(name), found.module)
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
    gate = getattr(block, GATE, None)
    probe = copy.copy(block)
    probe._modules = {**block._modules, experts: _Times(2.0), name: _Times(3.0)}
    hidden = _hidden_states(block, experts, name)
    given = _tried(probe, hidden)
    weight = 1.0 if gate is None else torch.sigmoid(gate(hidden))
    if not torch.allclose(given, 2 * hidden + weight * (3 * hidden), rtol=2e-2):
        how = "as they are" if gate is None else f"times the sigmoid of {GATE}"
        raise ValueError(f"{type(block).__name__} must add its {name} {how} to its routed experts")
    return SharedExperts(block, name, gate)


def _hidden_states(block: nn.Module, experts: str, name: str) -> Tensor:
    """Hidden states [1, tokens, hidden] that a block takes, whatever its shared experts' linears keep as parameters.

    Quantized ones have codes, whose dtype and columns are not those of hidden states.
    """
    shared = block.get_submodule(name)
    said: list[Any] = [getattr(module, "in_features", None) for module in shared.modules()]
    size = next((n for n in said if isinstance(n, int)), next(shared.parameters()).shape[-1])
    children = (block._modules.get(GATE), *(m for n, m in block.named_children() if n not in (experts, name)), shared)
    parameters = [p for child in children if child is not None for p in child.parameters()]
    like = next((p for p in parameters if p.dtype in FLOATS), parameters[0])
    hidden = torch.randn(1, _TOKENS, size, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    return hidden.to(like)


@torch.no_grad()
def _check_function(shared: nn.Module, experts: Any) -> None:
    """Compare what shared experts do beside their products with what the routed ones do.

    They may differ in one model: some clamp their routed experts alone. Stand-ins take the place of the products.
    """
    device = next(shared.parameters()).device
    values = torch.linspace(-_LARGEST, _LARGEST, _VALUES, device=device, dtype=torch.float32)
    gate = values[torch.randperm(_VALUES, generator=torch.Generator().manual_seed(0)).to(values.device)][None]
    probe = copy.copy(shared)
    probe._modules = {name: _STANDING.get(name, module) for name, module in shared._modules.items()}
    expected = module_activation(experts, gate, gate.flip(-1))
    given = _tried(probe, gate)
    if given.shape != expected.shape or not torch.allclose(given.float(), expected.float(), rtol=1e-4, atol=1e-4):
        raise ValueError(f"{type(shared).__name__} must have the activation of {type(experts).__name__}")


def _tried(probe: nn.Module, hidden: Tensor) -> Tensor:
    """What a module of transformers gives. Raises ValueError where it asks for more than hidden states."""
    try:
        given = probe(hidden)
    except (TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise ValueError(f"{type(probe).__name__} must take hidden states alone: {error}") from error
    if not isinstance(given, Tensor):
        raise ValueError(f"{type(probe).__name__} must give a tensor, got {type(given).__name__}")
    return given


class _Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states * self.factor


class _Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


# Of products: gates are what comes in, ups the same backwards.
_STANDING = {
    "gate_proj": _Function(lambda x: x),
    "up_proj": _Function(lambda x: x.flip(-1)),
    "gate_up_proj": _Function(lambda x: torch.cat((x, x.flip(-1)), -1)),
    "down_proj": _Function(lambda x: x),
}
