"""Training through packed experts: compiled, checkpointed, under autocast, by transforms; and what costs nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import Case, make_batch, make_raw
from torch import Tensor
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch.utils.checkpoint import checkpoint

import torch_moe_ops as moe

CASE = Case(tokens=9, experts=6, top_k=3)
ROUTING = moe.Routing("renormalize", 3)
FORMATS = pytest.mark.parametrize(("scheme", "act"), [("nvfp4", "none"), ("nvfp4", "nvfp4"), ("none", "none")])


class Block(torch.nn.Module):
    """A router, packed experts with biases that learn, and a linear behind them."""

    def __init__(self, scheme: str = "nvfp4", act: str = "none", dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        case = dataclasses.replace(CASE, scheme=scheme, act_format=act, bias=True, dtype=dtype)
        w = moe.prepare(make_raw(case), act_format=act)
        self.w13_bias, self.w2_bias = (torch.nn.Parameter(t) for t in (w.w13_bias, w.w2_bias))
        self.w = w
        torch.manual_seed(0)
        self.router = torch.nn.Linear(case.hidden, case.experts, bias=False, dtype=dtype)
        self.down = torch.nn.Linear(case.hidden, 8, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        w = dataclasses.replace(self.w, w13_bias=self.w13_bias, w2_bias=self.w2_bias)
        return self.down(moe.fused_moe(x, self.router(x), w, routing=ROUTING) + x)


def _x(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return make_batch(dataclasses.replace(CASE, dtype=dtype))[0].requires_grad_()


def _step(block: Block, run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Output and gradients of one step."""
    block.zero_grad()
    out = run(x)
    out.float().square().sum().backward()
    found = [out.detach(), x.grad, *(p.grad.clone() for p in block.parameters())]
    x.grad = None
    return found


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


@FORMATS
def test_one_graph_forward_and_one_backward(scheme: str, act: str) -> None:
    block, x = Block(scheme, act), _x()
    expected = _step(block, block, x)
    torch._dynamo.reset()
    recorded = AotEagerAndRecordGraphs()
    found = _step(block, torch.compile(block, fullgraph=True, backend=recorded), x)
    assert _same(found, expected)
    assert (len(recorded.fw_graphs), len(recorded.bw_graphs)) == (1, 1)
    targets = {str(node.target) for node in recorded.bw_graphs[0].graph.nodes}
    assert "moeq.moe_routed_backward.default" in targets
    assert not any("refuse" in name for name in targets)
    # Nothing but inputs and the routing goes from one graph to the other: no result of an expert does.
    kept = {tuple(node.meta["val"].shape) for node in recorded.bw_graphs[0].graph.find_nodes(op="placeholder")}
    assert (CASE.tokens, 2 * CASE.inter) not in kept
    assert (CASE.tokens * CASE.top_k, 2 * CASE.inter) not in kept


@pytest.mark.slow
def test_inductor() -> None:
    block, x = Block(dtype=torch.float32), _x(torch.float32)
    expected = _step(block, block, x)
    torch._dynamo.reset()
    for found, own in zip(_step(block, torch.compile(block, fullgraph=True), x), expected, strict=True):
        torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-5)


def test_dynamic_numbers_of_tokens() -> None:
    block = Block()
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (5, 9, 2):
        x = torch.randn(tokens, CASE.hidden).bfloat16().requires_grad_()
        assert _same(_step(block, compiled, x), _step(block, block, x))


@FORMATS
@pytest.mark.parametrize("compiled", [False, True])
def test_activation_checkpointing(scheme: str, act: str, compiled: bool) -> None:
    block, x = Block(scheme, act), _x()
    expected = _step(block, block, x)

    def run(x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False)

    torch._dynamo.reset()
    again = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    assert _same(_step(block, again, x), expected)


def test_nothing_but_arguments_is_saved() -> None:
    block, x = Block(), _x()
    w = block.w
    ids, weights = moe.route(torch.randn(CASE.tokens, CASE.experts), ROUTING)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        moe.fused_moe_routed(x, ids, weights.requires_grad_(), w)
    given = {t.data_ptr() for t in (x, ids, weights, *w.tensors().values())}
    assert kept
    assert all(t.data_ptr() in given for t in kept)


def test_autocast() -> None:
    block, x = Block(), _x()
    expected = _step(block, block, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert _same(_step(block, block, x), expected)
    plain = Block(dtype=torch.float32)
    leaf = _x(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = plain(leaf)
    out.float().sum().backward()
    assert leaf.grad.dtype == torch.float32
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in plain.parameters())


@pytest.mark.parametrize(
    "ask",
    [
        lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
        lambda f, x: torch.func.vjp(f, x)[1](torch.ones_like(x))[0],
        lambda f, x: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(x[None])[0],
        lambda f, x: torch.autograd.functional.vjp(f, x, torch.ones_like(x))[1],
        lambda f, x: torch.func.jacrev(lambda x: f(x).sum(0))(x).sum(0),
    ],
    ids=["grad", "vjp", "grad of each", "functional.vjp", "jacrev"],
)
def test_transforms(ask: Callable[..., Any]) -> None:
    case = dataclasses.replace(CASE, dtype=torch.float32)
    w = moe.prepare(make_raw(case), act_format="none")
    x, ids, weights = make_batch(case)

    def layer(x: Tensor) -> Tensor:
        return moe.fused_moe_routed(x, ids, weights, w)

    leaf = x.clone().requires_grad_()
    layer(leaf).sum().backward()
    torch.testing.assert_close(ask(layer, x), leaf.grad, rtol=1e-5, atol=1e-6)


def test_a_second_derivative_is_refused_by_name() -> None:
    x = _x()
    _, ids, weights = make_batch(CASE)
    out = moe.fused_moe_routed(x, ids, weights, moe.prepare(make_raw(CASE)))
    (first,) = torch.autograd.grad(out.float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="moeq::moe_routed_backward: inputs must be detached"):
        first.sum().backward()


def test_weights_that_change_between_the_passes_are_noticed() -> None:
    x = _x()
    _, ids, weights = make_batch(CASE)
    w = moe.prepare(make_raw(CASE))
    out = moe.fused_moe_routed(x, ids, weights, w)
    w.update_(make_raw(dataclasses.replace(CASE, seed=5)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_only_what_is_asked_for() -> None:
    """Where routing weights alone learn, hidden states get nothing, and the other way round."""
    x, ids, weights = make_batch(CASE)
    w = moe.prepare(make_raw(CASE))
    learned = weights.clone().requires_grad_()
    moe.fused_moe_routed(x, ids, learned, w).sum().backward()
    leaf = x.clone().requires_grad_()
    moe.fused_moe_routed(leaf, ids, weights, w).sum().backward()
    both = x.clone().requires_grad_(), weights.clone().requires_grad_()
    moe.fused_moe_routed(both[0], ids, both[1], w).sum().backward()
    assert torch.equal(leaf.grad, both[0].grad)
    assert torch.equal(learned.grad, both[1].grad)
    assert x.grad is None
