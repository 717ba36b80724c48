"""The gradient of router logits against autograd through the reference, for every method and option."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tolerances import relative_l2

import torch_moe_ops as moe
from torch_moe_ops.core.routing_methods import METHODS
from torch_moe_ops.gradients.routing import logits_gradient
from torch_moe_ops.routing.reference import SCORES, route_reference

EXPERTS = 16


def _routers(name: str) -> list[dict[str, Any]]:
    method = METHODS[name]
    k = 1 if method.max_top_k == 1 else 4
    found: list[dict[str, Any]] = [{"top_k": k}]
    if method.takes_bias:
        found.append({"top_k": k, "bias": torch.randn(EXPERTS)})
    if method.takes_groups:
        found.append({"top_k": k, "n_group": 4, "topk_group": 2})
    if method.takes_scaling_factor:
        found.append({"top_k": k, "routed_scaling_factor": 2.5})
    if method.can_choose_renormalize:
        found += [{"top_k": k, "renormalize": flag} for flag in (True, False)]
    return found


ROUTERS = [(name, options) for name in METHODS for options in _routers(name)]


@pytest.mark.parametrize(("name", "options"), ROUTERS)
def test_against_autograd(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    routing = moe.Routing(method=name, **options)
    given = (routing.bias, name, routing.top_k, routing.n_group, routing.topk_group)
    tail = (routing.routed_scaling_factor, routing.renormalize)
    logits = (torch.randn(33, EXPERTS) * 2).double().requires_grad_()
    ids, weights = route_reference(logits, *given, *tail, dtype=torch.float64)
    grad = torch.randn(weights.shape).double()
    weights.backward(grad)
    torch.testing.assert_close(logits_gradient(grad, logits, ids, name, *tail).detach(), logits.grad)

    leaf = logits.detach().float().requires_grad_()
    own_ids, own_weights = moe.route(leaf, routing)
    assert torch.equal(own_ids, ids)
    assert not own_ids.requires_grad
    own_weights.backward(grad.float())
    assert relative_l2(leaf.grad, logits.grad) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_of_the_logits(dtype: torch.dtype) -> None:
    leaf = torch.randn(5, EXPERTS).to(dtype).requires_grad_()
    moe.route(leaf, moe.Routing("sigmoid", 3))[1].sum().backward()
    expected = torch.zeros(5, EXPERTS)
    ids, weights = moe.route(leaf.detach(), moe.Routing("sigmoid", 3))
    expected.scatter_(1, ids.long(), weights * (1 - weights))
    assert leaf.grad.dtype == dtype
    torch.testing.assert_close(leaf.grad.float(), expected, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", METHODS)
def test_nan_and_far_out_logits_do_not_disturb(name: str) -> None:
    logits = torch.randn(4, EXPERTS)
    logits[0, 3], logits[1, 2], logits[1, 5], logits[2] = float("nan"), 90.0, -90.0, float("nan")
    leaf = logits.clone().requires_grad_()
    k = min(METHODS[name].max_top_k, 4)
    moe.route(leaf, moe.Routing(name, k))[1].sum().backward()
    assert leaf.grad.isfinite().all()
    assert (leaf.grad[logits.isnan()] == 0).all()
    other = logits[3:].clone().requires_grad_()
    moe.route(other, moe.Routing(name, k))[1].sum().backward()
    assert torch.equal(other.grad[0], leaf.grad[3])


def test_a_routing_bias_gets_no_gradient() -> None:
    bias, logits = torch.randn(EXPERTS, requires_grad=True), torch.randn(5, EXPERTS, requires_grad=True)
    moe.route(logits, moe.Routing("deepseek_v3", 4, bias=bias))[1].sum().backward()
    assert bias.grad is None
    assert logits.grad is not None


def test_every_score_has_a_derivative() -> None:
    from torch_moe_ops.gradients.routing import DERIVATIVES

    assert set(DERIVATIVES) == set(SCORES)
