"""MoE blocks of transformers that keep the experts interface out of reach: given one, class by class.

Llama 4 runs every expert on every token, which its routing weight has multiplied before. Its blocks get a forward that
runs the chosen expert alone, where their experts are packed; otherwise they run as before.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from torch_moe_ops.prepared.fused import fused_moe_routed

_LLAMA4 = "Llama4TextExperts"
# What use_experts_implementation says of modules that have the interface.
_INTERFACE = {"is_transposed": True, "is_concatenated": True, "has_gate": True, "has_bias": False}
# Options of `prepare` that an adapted module asks for, beside those that a caller gives.
PREPARE_OPTIONS = "moeq_prepare_options"


def adapt(block: nn.Module, experts: Any) -> bool:
    """Make a module of experts one that `find_experts` knows. Whether it is of a class that needs that.

    Args:
        block: the module that `experts` belongs to, whose class gets another forward.

    Raises: ValueError for a routing that the op does not have.
    """
    if type(experts).__name__ != _LLAMA4:
        return False
    if block.top_k != 1:
        raise ValueError(f"{_LLAMA4}: num_experts_per_tok must be 1 to multiply tokens by weights, got {block.top_k}")
    experts.__dict__.update(_INTERFACE)
    experts.__dict__[PREPARE_OPTIONS] = {"router_weight_on_input": True}
    kind: Any = type(block)
    theirs = kind.forward
    if hasattr(theirs, "moeq_original"):
        return True

    @functools.wraps(theirs)
    def forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        holder = getattr(self.experts, "moeq_weights", None)
        if holder is None:
            return theirs(self, hidden_states)  # type: ignore[no-any-return]
        return _llama4(self, hidden_states, holder)

    forward.moeq_original = theirs  # type: ignore[attr-defined]
    kind.forward = forward
    return True


def is_adapted(experts: nn.Module) -> bool:
    """Whether the module runs without transformers' experts interface."""
    return PREPARE_OPTIONS in experts.__dict__


def _llama4(block: Any, hidden_states: Tensor, holder: Any) -> tuple[Tensor, Tensor]:
    """Shared and routed experts, and the router's logits."""
    rows = hidden_states.reshape(-1, block.hidden_dim)
    logits = nn.Linear.forward(block.router, rows)
    top, ids = torch.topk(logits, block.top_k, dim=1)
    # Rounded to the model's dtype as there: the weights multiply tokens of that dtype.
    weights = torch.sigmoid(top.float()).to(top.dtype)
    return block.shared_expert(rows) + fused_moe_routed(rows, ids, weights, holder.prepared), logits
