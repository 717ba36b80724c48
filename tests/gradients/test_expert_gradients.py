"""Gradients of the expert ops against autograd through dequantized weights (support/straight_through.py)."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
import torch
from gradient_cases import (
    F32,
    FORMATS,
    LARGE,
    LIMITS,
    backends_of,
    bounds_of,
    check_biases,
    differentiated,
    leaf,
    learning,
)
from problems import Case, make_batch, make_raw
from raw_forms import Form, raw_of
from straight_through import Leaves, layer, layer_of, weights_of
from tolerances import relative_l2
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.core.activations import ACTIVATIONS
from torch_moe_ops.core.schemes import SCHEMES


def _grad(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _check(case: Case, backend: str, ids: Tensor | None = None, **options: Any) -> None:
    """Both gradients of hidden states, routing weights and biases, within the bounds."""
    raw, constants = make_raw(case), options.pop("constants", (None, None, None))
    w = learning(case, backend, constants, **options)
    x, own_ids, weights = make_batch(case)
    ids = own_ids if ids is None else ids
    x, weights = leaf(x), leaf(weights)
    out = moe.fused_moe_routed(x, ids, weights, w)
    grad = differentiated(out)

    leaves = Leaves(*(leaf(t, torch.float32) for t in (x, weights, raw.w13_bias, raw.w2_bias)))
    expected = layer_of(case, w, leaves, ids, constants)
    expected.backward(grad.float())
    bound, moved = bounds_of(case)  # what moves reaches the gradient of the routing weights alone
    assert x.grad.dtype == case.dtype
    assert weights.grad.dtype == torch.float32
    assert relative_l2(x.grad, leaves.x.grad) <= bound
    assert relative_l2(weights.grad, _grad(leaves.weights)) <= moved
    if case.bias:
        check_biases(case, w, _grad(leaves.w13_bias), _grad(leaves.w2_bias), bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("scheme", "act"), FORMATS)
def test_every_format(scheme: str, act: str, dtype: torch.dtype) -> None:
    case = replace(LARGE, scheme=scheme, act_format=act, dtype=dtype, bias=True, foreign=True)
    for backend in backends_of(case):
        _check(case, backend)


@pytest.mark.parametrize("scale", ["tensor", "expert"])
@pytest.mark.parametrize(("scheme", "act"), [(s.name, act) for s in SCHEMES.values() for act in s.static_acts])
def test_calibrated_activations(scheme: str, act: str, scale: str) -> None:
    case = replace(LARGE, scheme=scheme, act_format=act, input_scale=scale, dtype=torch.float32)
    for backend in backends_of(case):
        _check(replace(case, per_half=scheme == "nvfp4"), backend)


@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("policy", ["packed", "folded"])
def test_weight_policies(policy: str, scheme: str) -> None:
    case = replace(LARGE, scheme=scheme, act_format="fp8", weight_policy=policy, dtype=torch.float32)
    _check(replace(case, per_half=scheme == "nvfp4" and case.per_half), "reference")


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation: str, backend: str) -> None:
    case = replace(LARGE, activation=activation, dtype=torch.float32, bias=True)
    _check(case, backend)
    if activation in LIMITS:
        _check(case, backend, constants=LIMITS[activation])


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": 1},
        {"tokens": 1, "top_k": 1, "experts": 1},
        {"hidden": 64, "inter": 16},
        {"scheme": "none", "hidden": 40, "inter": 24},  # padded by the layout
        {"scheme": "fp8_block", "hidden": 200, "inter": 136},
        {"scheme": "int4", "hidden": 96, "inter": 40},
        {"dtype": torch.float16},
    ],
    ids=str,
)
def test_sizes(backend: str, changes: dict[str, Any]) -> None:
    _check(replace(LARGE, **{"dtype": torch.float32, "bias": True, **changes}), backend)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    "ids",
    [
        [[2, 2], [2, 0], [0, 0]],  # duplicates, and experts that nobody visits
        [[5, -1], [2**31 - 1, -(2**31)], [4, 1]],
        [[-1, -1], [9, 9], [-1, 9]],  # nobody is here
    ],
    ids=["duplicate", "foreign", "none"],
)
@pytest.mark.parametrize("offset", [0, 3])
def test_ids(backend: str, ids: list[list[int]], offset: int) -> None:
    case = Case(tokens=3, dtype=torch.float32, bias=True)
    given = torch.tensor(ids, dtype=torch.int64)
    shifted = torch.where(given.abs() < 100, given + offset, given).to(torch.int32)
    _check(case, backend, shifted, num_experts=4 + offset, local_expert_offset=offset)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("act", ["none", "nvfp4"])
def test_weight_on_the_input(backend: str, act: str) -> None:
    case = replace(LARGE, top_k=1, dtype=torch.float32, act_format=act, bias=True)
    _check(case, backend, router_weight_on_input=True)
    if act == "none":
        _check(replace(case, dtype=torch.bfloat16), backend, router_weight_on_input=True)


def test_no_token() -> None:
    case = replace(LARGE, tokens=0, bias=True)
    w = moe.prepare(make_raw(case))
    x, ids, weights = make_batch(case)
    w = dataclasses.replace(w, w13_bias=leaf(w.w13_bias), w2_bias=leaf(w.w2_bias))
    x, weights = leaf(x), leaf(weights)
    moe.fused_moe_routed(x, ids, weights, w).sum().backward()
    assert x.grad.shape == (0, case.hidden)
    assert weights.grad.shape == (0, case.top_k)
    assert w.w13_bias.grad.eq(0).all()
    assert w.w2_bias.grad.eq(0).all()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_packed_hidden_states_have_none_and_routing_weights_have_one(backend: str) -> None:
    case = replace(LARGE, act_format="nvfp4", input_scale="tensor")
    w = moe.prepare(make_raw(case), act_format="nvfp4", backend=backend)
    x, ids, weights = make_batch(case)
    weights = leaf(weights)
    moe.fused_moe_routed(x, ids, weights, w).sum().backward()
    expected, weights.grad = weights.grad, None
    codes, scale = moe.quantize_nvfp4(x, w.a1_gscale)
    moe.fused_moe_routed(codes, ids, weights, w, hidden_states_scale=scale).sum().backward()
    assert relative_l2(weights.grad, expected) <= F32


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("method", ["renormalize", "default", "deepseek_v3", "sigmoid", "topk", "llama4"])
def test_monolithic_ops_differentiate_through_the_router(method: str, backend: str) -> None:
    case = replace(LARGE, dtype=torch.float32, act_format="none")
    raw = make_raw(case)
    w = moe.prepare(raw, act_format="none", backend=backend)
    routing = moe.Routing(method, 1 if method == "llama4" else 3)
    x, _, _ = make_batch(case)
    logits = torch.randn(case.tokens, case.experts)
    leaf_x, leaf_logits = leaf(x), leaf(logits)
    out = moe.fused_moe(leaf_x, leaf_logits, w, routing=routing)
    assert torch.equal(out, moe.fused_moe(x, logits, w, routing=routing))
    grad = torch.randn(out.shape)
    out.backward(grad)

    ids, weights = moe.route(logits, routing)
    expected = Leaves(leaf(x), leaf(weights), None, None)
    layer(expected, ids, raw, *weights_of(raw, "exact"), "none", on_input=method == "llama4").backward(grad)
    assert relative_l2(leaf_x.grad, expected.x.grad) <= F32
    again = leaf(logits)
    moe.route(again, routing)[1].backward(expected.weights.grad)
    assert relative_l2(leaf_logits.grad, again.grad) <= F32


@pytest.mark.parametrize("points", [False, True], ids=["symmetric", "zero points"])
@pytest.mark.parametrize("scheme", ["int4", "int8"])
def test_what_pads_a_bias_does_not_learn(scheme: str, points: bool) -> None:
    """A code of 0 is no zero where codes have an offset: padded rows would get gradients, and with the optimizer's next
    step results."""
    case = Case(scheme=scheme, hidden=64, inter=40, bias=True, activation="swigluoai", dtype=torch.float32)
    raw = raw_of(case, Form("rows", (torch.float32,) * 2, (points, points)))
    layers = []
    for backend in ("cpu", "reference"):
        w = moe.prepare(raw, act_format="none", backend=backend)
        layers.append(dataclasses.replace(w, w13_bias=leaf(w.w13_bias), w2_bias=leaf(w.w2_bias)))
    given = make_batch(case)
    for w in layers:
        differentiated(moe.fused_moe_routed(*given, w))
    found = layers[0].w13_bias.grad.unflatten(1, (2, -1))
    assert found.shape[2] > case.inter and not found[:, :, case.inter :].any()
    steps = [dataclasses.replace(w, w13_bias=(w.w13_bias - w.w13_bias.grad).detach()) for w in layers]
    ours, theirs = (moe.fused_moe_routed(*given, w) for w in steps)
    assert relative_l2(ours, theirs) <= F32
    assert all(torch.equal(t, getattr(moe.restore(layers[0]), name)) for name, t in raw.tensors().items())


def test_two_runs_give_the_same_bits() -> None:
    case = replace(LARGE, tokens=64, bias=True, act_format="nvfp4")
    w = moe.prepare(make_raw(case), act_format="nvfp4")
    x, ids, weights = make_batch(case)
    found = []
    for _ in range(2):
        leaves = leaf(x), leaf(weights)
        moe.fused_moe_routed(leaves[0], ids, leaves[1], w).backward(torch.ones_like(x))
        found.append([leaf.grad for leaf in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_token_is_independent_of_the_others() -> None:
    w = moe.prepare(make_raw(LARGE))
    x, ids, weights = make_batch(LARGE)
    whole, broken = leaf(x), leaf(x)
    moe.fused_moe_routed(whole, ids, weights, w).sum().backward()
    with torch.no_grad():
        broken[5] = float("nan")
    moe.fused_moe_routed(broken, ids, weights, w).sum().backward()
    others = torch.arange(LARGE.tokens) != 5
    assert broken.grad[5].isnan().any()
    assert torch.equal(broken.grad[others], whole.grad[others])
