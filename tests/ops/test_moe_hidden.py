"""moeq::moe_hidden: what moeq::route_hidden and the routed op make of the same hidden states, on any backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from problems import Case
from samples import hidden_call
from torch import Tensor

from torch_moe_ops.core.schemas import arguments
from torch_moe_ops.core.schemes import SCHEMES

CASE = Case(hidden=96, inter=64, bias=True)
ROUTE = arguments("route_hidden")[0][:10]
moe_hidden = torch.ops.moeq.moe_hidden


def in_two(given: dict[str, Any]) -> tuple[Tensor, ...]:
    """output, ids, weights, logits."""
    options = {"logits_dtype": given["logits_dtype"]}
    ids, weights, logits = torch.ops.moeq.route_hidden(*(given[name] for name in ROUTE), **options)
    prefix = SCHEMES[given["scheme"]].op_prefix
    given = {**given, "topk_ids": ids, "topk_weights": weights, "hidden_states_scale": None}
    given |= {
        "element": SCHEMES[given["scheme"]].element,
        "router_weight_on_input": given["routing_method"] == "llama4",
    }
    names = arguments(f"{prefix}moe_routed")[0]
    return getattr(torch.ops.moeq, f"{prefix}moe_routed")(*(given[name] for name in names)), ids, weights, logits


@pytest.mark.parametrize("backend", ("cpu", "reference"))
@pytest.mark.parametrize("scheme", ("nvfp4", "mxfp4", "mxfp6_e2m3", "int4", "fp8_block", "none"))
@pytest.mark.parametrize("method", ("renormalize", "deepseek_v3", "llama4"))
def test_it_is_the_router_and_the_routed_op(scheme: str, method: str, backend: str) -> None:
    case = replace(CASE, scheme=scheme, top_k=1 if method == "llama4" else 2)
    given = hidden_call(case, backend, "cpu", method, bias=True)
    for out_dtype in (None, torch.float32):
        given["out_dtype"] = out_dtype
        for got, want in zip(moe_hidden(**given), in_two(given), strict=True):
            assert torch.equal(got, want) and got.dtype is want.dtype


def test_of_experts_of_a_share() -> None:
    given = hidden_call(CASE, "cpu", "cpu")
    given |= {"router_weight": torch.cat([given["router_weight"]] * 2), "num_experts": 8, "local_expert_offset": 2}
    output, ids, weights, logits = moe_hidden(**given)
    assert logits.shape == (5, 8) and (ids >= 6).any()
    assert all(torch.equal(a, b) for a, b in zip((output, ids, weights, logits), in_two(given), strict=True))
    given["num_experts"] = 0
    with pytest.raises(
        RuntimeError, match="num_experts must be 8, the rows of router_weight, where only 4 experts are"
    ):
        moe_hidden(**given)


def test_gradients_are_those_of_the_two_ops() -> None:
    found = []
    for run in (lambda given: moe_hidden(**given), in_two):
        given = hidden_call(replace(CASE, dtype=torch.float32), "cpu", "cpu", bias=False)
        leaves = [given[name].requires_grad_() for name in ("hidden_states", "router_weight", "w13_bias", "w2_bias")]
        output, _, weights, logits = run(given)
        (output.square().sum() + weights.sum() + logits.sin().sum()).backward()
        found.append([leaf.grad for leaf in leaves])
    assert all(a.abs().sum() > 0 and torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_no_tokens() -> None:
    output, ids, weights, logits = moe_hidden(**hidden_call(replace(CASE, tokens=0), "cpu", "cpu"))
    assert output.shape == (0, 96) and ids.shape == weights.shape == (0, 2) and logits.shape == (0, 4)
