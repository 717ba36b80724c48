"""How errors of ops show what came."""

from __future__ import annotations

import pytest
import torch

import torch_moe_ops as moe
from torch_moe_ops.core.check import describe


def test_values_are_shown_whole_where_they_are_short() -> None:
    assert describe("route", "top_k", "be positive", 0) == "moeq::route: top_k must be positive, got 0"
    assert describe("route", "x", "have two dimensions", torch.Size([3])).endswith("got (3,)")


def test_a_long_value_is_cut() -> None:
    w = moe.prepare(moe.quantize_experts(torch.randn(2, 64, 32), torch.randn(2, 32, 32), "int4"), backend="reference")
    x, ids, weights = torch.randn(1, 32), torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1)
    with pytest.raises(RuntimeError, match=r"weight_policy must be one of .*, got 'exact99") as error:
        torch.ops.moeq.int4_moe_routed(
            x, None, ids, weights, *w.op_weights(), "reference", weight_policy="exact" + "9" * 100_000
        )
    assert len(str(error.value)) < 1000
