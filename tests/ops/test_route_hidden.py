"""moeq::route_hidden: logits, ids and weights against the product and the routing that it stands for, on any device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from routing_oracle import WITH_BIAS, draw_bias, groups_of
from torch import Tensor
from torch.nn.functional import linear

from torch_moe_ops.core.routing_methods import ROUTING_METHODS
from torch_moe_ops.routing.product import router_logits
from torch_moe_ops.routing.reference import route_reference

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EXPERTS, HIDDEN = 16, 40
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
route_hidden = torch.ops.moeq.route_hidden


def make(device: str, dtype: torch.dtype = torch.bfloat16, tokens: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    g = torch.Generator().manual_seed(0)
    made = (torch.randn(tokens, HIDDEN, generator=g), torch.randn(EXPERTS, HIDDEN, generator=g) / 6)
    return *(t.to(device, dtype) for t in made), torch.randn(EXPERTS, generator=g).to(device, dtype)  # type: ignore[return-value]


@devices
@pytest.mark.parametrize("method", ROUTING_METHODS)
def test_it_is_route_of_its_logits(method: str, device: str) -> None:
    x, weight, bias = make(device)
    correction = draw_bias(EXPERTS, seed=4).to(device) if method in WITH_BIAS else None
    options = (correction, method, 1 if method == "llama4" else 3, *groups_of(method, (4, 2)))
    ids, weights, logits = route_hidden(x, weight, bias, *options)
    want_ids, want = torch.ops.moeq.route(logits, *options)
    assert torch.equal(ids, want_ids) and ids.dtype == torch.int32
    torch.testing.assert_close(weights, want, rtol=1e-6, atol=0)
    assert logits.dtype == torch.float32 and ids.shape == weights.shape == (9, options[2])


@devices
@pytest.mark.parametrize("method", ("default", "renormalize_naive"))
def test_equal_logits_where_the_choice_ends_beside_close_ones(method: str, device: str) -> None:
    """By a softmax a logit of -1e-8 is as good as 0, and its number is lower."""
    weight = torch.eye(EXPERTS, HIDDEN)[:3]
    x = torch.zeros(2, HIDDEN)
    x[:, :3] = torch.tensor([[-1e-8, 0, 0], [0, 0, -1e-8]])
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    ids, _, logits = route_hidden(*(t.to(device, torch.bfloat16) for t in (x, weight)), None, None, method, 1)
    assert torch.equal(ids, route_reference(logits, None, method, 1)[0]) and ids.tolist() == [[0], [0]]


@devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("logits_dtype", (None, *DTYPES))
@pytest.mark.parametrize("tokens", (1, 9, 200))
def test_logits_are_rounded_once(
    dtype: torch.dtype, logits_dtype: torch.dtype | None, tokens: int, device: str
) -> None:
    """To the nearest of their dtype, of a sum in float32: a sum within the dtype of the operands would miss by more."""
    x, weight, bias = make(device, dtype, tokens)
    logits = route_hidden(x, weight, bias, None, "renormalize", 2, logits_dtype=logits_dtype)[2]
    assert logits.dtype == (logits_dtype or torch.float32)
    exact = linear(x.double(), weight.double(), bias.double())
    size = linear(x.double().abs(), weight.double().abs(), bias.double().abs())
    half_ulp = torch.finfo(logits.dtype).eps / 2 * (1 + 1e-3)
    assert ((logits.double() - exact).abs() <= half_ulp * exact.abs() + 2.0**-20 * size).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_one_dtype_logits_have_the_bits_of_linear(dtype: torch.dtype) -> None:
    """So that a model's router chooses the same experts."""
    x, weight, bias = make("cpu", dtype)
    for given in (bias, None):
        logits = route_hidden(x, weight, given, None, "renormalize", 2, logits_dtype=dtype)[2]
        assert torch.equal(logits, linear(x, weight, given))
    assert torch.equal(router_logits(x, weight, bias, dtype), linear(x, weight, bias))


@devices
def test_operands_of_different_dtypes(device: str) -> None:
    """A router whose weight a model keeps in float32."""
    x, weight, bias = make(device)
    logits = route_hidden(x, weight.float() / 3, bias, None, "renormalize", 2)[2]
    exact = linear(x.double(), (weight.float() / 3).double(), bias.double())
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)


@devices
@pytest.mark.parametrize("given", (False, True))
def test_shared_experts_follow(given: bool, device: str) -> None:
    x, weight, _ = make(device)
    shared = torch.rand(9, 2, device=device) if given else None
    options: dict[str, Any] = {"num_shared_experts": 2, "shared_expert_weights": shared}
    ids, weights, logits = route_hidden(x, weight, None, None, "default", 3, **options)
    want_ids, want = torch.ops.moeq.route(logits, None, "default", 3, **options)
    assert torch.equal(ids, want_ids) and torch.equal(weights, want) and ids.shape == (9, 5)


def _loss(ids: Tensor, weights: Tensor, logits: Tensor) -> Tensor:
    """Different for every weight and logit."""
    spread = torch.linspace(0.5, 2.0, weights.numel()).view_as(weights)
    return (weights * spread).sum() + (logits.float() ** 2).mean()


@pytest.mark.parametrize("method", ("default", "renormalize", "deepseek_v3", "minimax2"))
def test_gradients_are_those_of_the_parts(method: str) -> None:
    correction = draw_bias(EXPERTS, seed=4) if method in WITH_BIAS else None
    shared = torch.rand(9, 1)
    found = []
    for whole in (True, False):
        leaves = [t.clone().requires_grad_() for t in (*make("cpu", torch.float32), shared)]
        x, weight, bias, of_shared = leaves
        options: dict[str, Any] = {"num_shared_experts": 1, "shared_expert_weights": of_shared}
        if whole:
            results = route_hidden(x, weight, bias, correction, method, 3, **options)
        else:
            logits = linear(x, weight, bias)
            results = (*torch.ops.moeq.route(logits, correction, method, 3, **options), logits)
        _loss(*results).backward()
        found.append([leaf.grad for leaf in leaves])
    for got, want in zip(*found, strict=True):
        assert want.abs().sum() > 0
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_only_what_requires_a_gradient_gets_one() -> None:
    x, weight, bias = make("cpu")
    weight.requires_grad_()
    _, weights, logits = route_hidden(x, weight, bias, None, "renormalize", 3)
    (weights.sum() + logits.sum()).backward()
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16 and x.grad is None
    low = linear(x.float(), weight.detach().float(), bias.float())
    torch.testing.assert_close(weight.grad.float(), torch.ones_like(low).T @ x.float(), rtol=1e-2, atol=1e-2)


def test_one_graph_with_gradients() -> None:
    x, weight, bias = make("cpu", torch.float32)
    x.requires_grad_()

    def run(x: Tensor) -> Tensor:
        return _loss(*route_hidden(x * 2, weight, bias, None, "renormalize", 3, logits_dtype=torch.float32))

    torch._dynamo.reset()
    want = torch.autograd.grad(run(x), x)[0]
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(x), x)[0], want)


def test_autocast_changes_nothing() -> None:
    x, weight, bias = make("cpu", torch.float32)
    want = route_hidden(x, weight, bias, None, "renormalize", 3)
    with torch.autocast("cpu", torch.bfloat16):
        got = route_hidden(x, weight, bias, None, "renormalize", 3)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_in_float32_under_autocast(compiled: bool) -> None:
    """A compiler traces the backward pass where it traces the forward pass."""
    generator = torch.Generator().manual_seed(5)
    hidden, weight = (torch.randn(rows, 64, generator=generator) for rows in (7, 8))

    def product(weight: Tensor) -> Tensor:
        return torch.ops.moeq.route_hidden(hidden, weight, None, None, "default", 2)[2].square().sum()

    def gradient(autocast: bool) -> Tensor:
        leaf = weight.clone().requires_grad_()
        called = torch.compile(product, fullgraph=True, backend="aot_eager") if compiled and autocast else product
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result = called(leaf)
            if not compiled:
                result.backward()
        if compiled:
            result.backward()
        assert leaf.grad is not None
        return leaf.grad

    torch.testing.assert_close(gradient(True), gradient(False), rtol=1e-6, atol=1e-6)


def test_gradients_on_the_meta_device() -> None:
    leaf = torch.zeros(8, 64, device="meta", requires_grad=True)
    route_hidden(torch.zeros(7, 64, device="meta"), leaf, None, None, "default", 2)[2].sum().backward()
    assert leaf.grad is not None and leaf.grad.shape == (8, 64) and leaf.grad.is_meta
