"""What is refused before a rank exchanges anything: tensors whose tokens lie in other dimensions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torch_moe_ops as moe


@pytest.fixture
def layer() -> Any:
    """Of no group: what is tested comes before."""
    made = object.__new__(moe.ExpertParallel)
    made.w = SimpleNamespace(num_shared_experts=1)
    made.placement = SimpleNamespace(num_experts=5)
    return made


def _refused(name: str, last: int) -> Any:
    other = rf"ExpertParallel: {name} must have shape \(2, 3, {last}\) like hidden_states, got \(3, 2, {last}\)"
    return pytest.raises(RuntimeError, match=other)


def test_tokens_in_other_dimensions(layer: Any) -> None:
    x = torch.randn(2, 3, 64)
    right, other = torch.zeros(2, 3, 2, dtype=torch.int32), torch.zeros(3, 2, 2, dtype=torch.int32)
    for name, ids, weights in (("topk_ids", other, right), ("topk_weights", right, other)):
        with _refused(name, 2):
            layer(x, ids, weights.float())
    with _refused("lora_ids", 1):
        layer(x, right, right.float(), lora=object(), lora_ids=other[..., 0])


def test_logits_and_gates_in_other_dimensions(layer: Any) -> None:
    x, routing = torch.randn(2, 3, 64), moe.Routing("renormalize", top_k=2)
    with _refused("router_logits", 4):
        layer.fused(x, torch.randn(3, 2, 4), routing=routing)
    with _refused("shared_expert_weights", 1):
        layer.fused(x, torch.randn(6, 4), routing=routing, shared_expert_weights=torch.rand(3, 2, 1))
