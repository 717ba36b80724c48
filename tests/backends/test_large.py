"""Offsets beyond 2^31: weights of more than 2^31 elements, of which only the last expert is real."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from problems import Case, make_batch, make_raw

import torch_moe_ops as moe

pytestmark = pytest.mark.slow


def _with_leading_zeros(t: torch.Tensor, copies: int) -> torch.Tensor:
    """[1, ...] -> [copies, ...], zero but for the last; the zero pages are never touched."""
    out = torch.zeros(copies, *t.shape[1:], dtype=t.dtype, device=t.device)
    out[-1] = t[0]
    return out


@pytest.mark.parametrize("scheme", ["none", "nvfp4"])
def test_the_last_expert_of_more_than_2_31_elements(scheme: str) -> None:
    case = Case(scheme=scheme, experts=1, top_k=1, hidden=1024, inter=1024, tokens=3)
    one = moe.prepare(make_raw(case), act_format="none", backend="cpu")
    copies = 2**31 // one.w13.numel() + 2
    big = {name: _with_leading_zeros(t, copies) for name, t in one.tensors().items() if t.ndim and t.shape[0] == 1}
    many = dataclasses.replace(one, **big, num_experts=copies, num_local_experts=copies)
    assert many.w13.numel() > 2**31
    x, ids, weights = make_batch(case)
    out = moe.fused_moe_routed(x, torch.full_like(ids, copies - 1), weights, many)
    assert torch.equal(out, moe.fused_moe_routed(x, ids, weights, one))
    assert out.abs().max() > 0


def test_more_than_2_31_routed_elements_are_split_not_overflowed() -> None:
    """num_tokens * top_k * intermediate rows is beyond 2^31 before any token's own size is."""
    case = Case(scheme="none", experts=32, top_k=32, hidden=8, inter=2048, tokens=2**15 + 1)
    w = moe.prepare(make_raw(case), backend="cpu")
    x, _, weights = make_batch(dataclasses.replace(case, experts=32))
    ids = torch.arange(32, dtype=torch.int32).expand(case.tokens, 32).contiguous()
    assert case.tokens * 32 * 2048 > 2**31
    out = moe.fused_moe_routed(x, ids, weights, w)
    tail = slice(case.tokens - 2, None)
    assert torch.equal(out[tail], moe.fused_moe_routed(x[tail], ids[tail], weights[tail], w))
