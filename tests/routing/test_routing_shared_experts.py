"""Columns of shared experts behind those that moeq::route chooses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_moe_ops as moe
from torch_moe_ops.core.routing_methods import METHODS

EXPERTS = 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.max_top_k > 1])
def test_what_is_chosen_stays_and_shared_columns_follow(method: str, dtype: torch.dtype) -> None:
    logits, routing = torch.randn(5, EXPERTS), moe.Routing(method, 4)
    gate = torch.rand(2, 5).to(dtype).T
    ids, weights = moe.route(logits, routing, num_shared_experts=2, shared_expert_weights=gate)
    alone = moe.route(logits, routing)
    assert torch.equal(ids[:, :4], alone[0]) and torch.equal(weights[:, :4], alone[1])
    assert ids[:, 4:].tolist() == [[EXPERTS, EXPERTS + 1]] * 5 and torch.equal(weights[:, 4:], gate.float())
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32 and ids.is_contiguous()
    assert moe.route(logits, routing, num_shared_experts=28)[1][:, 4:].eq(1).all()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "rows": ({"shared_expert_weights": torch.ones(4, 2)}, r"num_tokens = 5 rows like router_logits, got \(4, 2\)"),
    "columns": ({"shared_expert_weights": torch.ones(5, 3)}, r"have shape \[num_tokens, 2\], got \(5, 3\)"),
    "dimensions": ({"shared_expert_weights": torch.ones(2)}, r"have shape \[num_tokens, 2\], got \(2,\)"),
    "dtype": ({"shared_expert_weights": torch.ones(5, 2).double()}, "shared_expert_weights must have dtype in"),
    "device": (
        {"shared_expert_weights": torch.ones(5, 2, device="meta")},
        "shared_expert_weights must be on cpu like router_logits, got meta",
    ),
    "llama4": ({"routing_method": "llama4", "top_k": 1}, "num_shared_experts must be 0 for 'llama4', got 2"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused_by_the_op_and_its_fake(name: str) -> None:
    changes, text = WRONG[name]
    given = {"routing_method": "renormalize", "top_k": 4, "num_shared_experts": 2, **changes}
    logits = torch.randn(5, EXPERTS)
    with pytest.raises(RuntimeError, match=text):
        torch.ops.moeq.route(logits, None, **given)
    if name != "device":
        meta = {n: v.to("meta") if isinstance(v, torch.Tensor) else v for n, v in given.items()}
        with pytest.raises(RuntimeError, match=text):
            torch.ops.moeq.route(logits.to("meta"), None, **meta)


@pytest.mark.parametrize("weights", [torch.tensor(1.0), torch.ones(5), torch.ones(5, 1, 1)], ids=lambda t: str(t.ndim))
def test_weights_of_other_dimensions_are_refused_by_the_op(weights: torch.Tensor) -> None:
    """`route` spreads one column over several shared experts, and leaves the rest to the op."""
    with pytest.raises(RuntimeError, match=r"moeq::route: shared_expert_weights must have shape \[num_tokens, 2\]"):
        moe.route(
            torch.randn(5, EXPERTS), moe.Routing("renormalize", 4), num_shared_experts=2, shared_expert_weights=weights
        )
