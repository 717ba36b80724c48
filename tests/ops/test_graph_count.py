"""How many graphs torch.compile makes of a model's layers: one for each set of constants, compiled once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import Case, make_raw
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

import torch_moe_ops as moe

CASE = Case(scheme="none", hidden=64, inter=32)
ROUTING = moe.Routing("deepseek_v3", 2, routed_scaling_factor=2.5)


class Layer(torch.nn.Module):
    def __init__(self, limit: float | None, routing: moe.Routing = ROUTING):
        super().__init__()
        self.w = moe.prepare(make_raw(CASE), backend="reference", swiglu_limit=limit)
        self.routing = routing

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        return moe.fused_moe(x, logits, self.w, routing=self.routing)


class Counted:
    """A compiler backend that counts. Layers share graphs only where they share the backend, too."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs += 1
        return aot_eager(graph, inputs)

    def compile(self, function: Callable[..., Any], dynamic: bool | None) -> Callable[..., Any]:
        return torch.compile(function, fullgraph=True, dynamic=dynamic, backend=self)


@pytest.fixture
def counted() -> Counted:
    torch._dynamo.reset()
    return Counted()


def _batch(tokens: int) -> tuple[Tensor, Tensor]:
    return torch.randn(tokens, CASE.hidden).bfloat16(), torch.randn(tokens, CASE.experts)


@pytest.mark.parametrize("limits", [(None,) * 4, (7.0,) * 4, (5.0, 6.0, 7.0, 8.0), (None, 7.0, None, 7.0)], ids=str)
def test_layers_compiled_by_themselves(limits: tuple[float | None, ...], counted: Counted) -> None:
    """Layers of the same constants share a graph, for any number of tokens; none is compiled twice."""
    layers = [Layer(limit) for limit in limits]
    compiled = [counted.compile(layer, dynamic=True) for layer in layers]
    for tokens in (5, 7, 9):
        for layer, run in zip(layers, compiled, strict=True):
            x, logits = _batch(tokens)
            torch.testing.assert_close(run(x, logits), layer(x, logits), rtol=0, atol=0)
    assert counted.graphs == len(set(limits))


@pytest.mark.parametrize("dynamic", [True, False, None])
def test_a_model_of_layers_that_differ(dynamic: bool | None, counted: Counted) -> None:
    layers = [Layer(limit) for limit in (5.0, 6.0, None, 8.0)]

    def model(x: Tensor, logits: Tensor) -> Tensor:
        for layer in layers:
            x = x + layer(x, logits)
        return x

    run = counted.compile(model, dynamic)
    for _ in range(2):
        x, logits = _batch(5)
        torch.testing.assert_close(run(x, logits), model(x, logits), rtol=0, atol=0)
    assert counted.graphs == 1


def test_factors_of_the_router(counted: Counted) -> None:
    def route(logits: Tensor, routing: moe.Routing) -> tuple[Tensor, Tensor]:
        return moe.route(logits, routing)

    run = counted.compile(route, dynamic=True)
    factors = (1.0, 2.5, 2.5, 1 / 3)
    for factor in factors:
        routing = moe.Routing("deepseek_v3", 2, routed_scaling_factor=factor)
        logits = torch.randn(5, 4)
        for got, expected in zip(run(logits, routing), moe.route(logits, routing), strict=True):
            assert torch.equal(got, expected)
    assert counted.graphs == len(set(factors))


def test_a_routing_made_in_the_compiled_function(counted: Counted) -> None:
    def route(logits: Tensor) -> tuple[Tensor, Tensor]:
        return moe.route(logits, moe.Routing("deepseek_v3", 2, routed_scaling_factor=2.5))

    run = counted.compile(route, dynamic=True)
    logits = torch.randn(5, 4)
    assert torch.equal(run(logits)[1], route(logits)[1])
    assert counted.graphs == 1
