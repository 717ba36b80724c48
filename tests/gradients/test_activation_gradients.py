"""Derivatives of activations against autograd through their formulas, on both sides of every clamp and on it."""

from __future__ import annotations

import math

import pytest
import torch

from torch_moe_ops.core.activations import ACTIVATIONS, apply_activation, resolve_constants
from torch_moe_ops.gradients.activations import activation_gradients

LIMITS = {"silu": (None, 1.5), "swigluoai": (None, 0.75), "swiglustep": (None, 0.5)}
CASES = [(name, limit) for name in ACTIVATIONS for limit in LIMITS.get(name, (None,))]


@pytest.mark.parametrize(("name", "limit"), CASES)
def test_against_autograd(name: str, limit: float | None) -> None:
    torch.manual_seed(0)
    gated = ACTIVATIONS[name].is_gated
    own = resolve_constants(name, limit=limit)
    points = torch.tensor([0.0, 1.5, -1.5, 0.75, -0.75, 0.5, -0.5, 7.0, -7.0, 40.0, -40.0])
    up = torch.cat((torch.randn(500) * 4, points)).double().requires_grad_()
    gate = torch.cat((torch.randn(500) * 4, points.flip(0))).double().requires_grad_() if gated else None
    grad = torch.randn(up.shape).double()
    inner_up, inner_gate = _inside(up, own[2]), None if gate is None else _inside(gate, own[2])
    apply_activation(name, inner_gate, inner_up, limit=limit).backward(grad)
    of_gate, of_up = activation_gradients(name, gate, up, grad, *own)
    torch.testing.assert_close(of_up.detach(), up.grad, rtol=1e-12, atol=1e-12)
    assert (of_gate is None) == (gate is None)
    if gate is not None and of_gate is not None:
        torch.testing.assert_close(of_gate.detach(), gate.grad, rtol=1e-12, atol=1e-12)
    if own[2] != math.inf:
        assert (up.abs() == own[2]).any() and (gate == own[2]).any()
        assert (of_up[up.abs() > own[2]] == 0).all()


def _inside(x: torch.Tensor, limit: float) -> torch.Tensor:
    """x, what lies on a bound next to it within: on it torch's own derivative is one or zero, by release."""
    return torch.where(x.abs() == limit, x * (1 - 2**-52), x)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_far_out_values_give_numbers(name: str) -> None:
    up = torch.tensor([1e4, -1e4, 80.0, -80.0, 0.0])
    gate = up.flip(0) if ACTIVATIONS[name].is_gated else None
    for found in activation_gradients(name, gate, up, torch.ones(5), *ACTIVATIONS[name].constants):
        assert found is None or found.isfinite().all()
