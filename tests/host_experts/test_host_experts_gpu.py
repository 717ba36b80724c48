"""A GPU and the CPU beside it: eager, in CUDA graphs, compiled, against the whole layer on the GPU."""

from __future__ import annotations

import pytest
import torch
from cuda_graphs import captured
from host_cases import batch, divided, result, whole
from problems import Case
from torch import Tensor

import torch_moe_ops as moe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

Given = tuple[Tensor, Tensor, Tensor]
# Kernels of a GPU and of the CPU round intermediates to bfloat16 from float32 sums of different orders.
CLOSE = 6e-3
CASES = [
    Case(experts=8, hidden=256, inter=128, tokens=4),
    Case(scheme="none", experts=8, hidden=256, inter=128, tokens=4),
    Case(scheme="mxfp4", experts=8, hidden=256, inter=128, tokens=1),
    Case(scheme="fp8_block", experts=8, hidden=256, inter=128, tokens=9),
]
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.scheme)


def distance(got: Tensor, expected: Tensor) -> float:
    return ((got.float() - expected.float()).norm() / expected.float().norm()).item()


def new_values(given: Given, seed: int) -> None:
    """Other tokens and another routing in the same memory."""
    g = torch.Generator().manual_seed(seed)
    hidden, ids, weights = given
    hidden.copy_(torch.randn(hidden.shape, generator=g))
    chosen = torch.stack([torch.randperm(8, generator=g)[: ids.shape[1]] for _ in range(ids.shape[0])])
    ids.copy_(chosen)
    weights.copy_(torch.rand(weights.shape, generator=g))


@cases
@pytest.mark.parametrize("host", [0, 3, [0, 2, 5, 7], 8])
def test_eager_calls(case: Case, host: int | list[int]) -> None:
    layer, w, given = divided(case, host, "cuda"), whole(case, "cuda"), batch(case, "cuda")
    for seed in range(3):
        new_values(given, seed)
        assert distance(layer(*given), result(w, given, torch.float32)) < CLOSE
    foreign = torch.full_like(given[1], -1)
    assert not layer(given[0], foreign, given[2]).any()


@cases
def test_replays_compute_with_what_is_there(case: Case) -> None:
    """Three layers share pinned memory and a stream within one graph; each replay has other rows and other experts."""
    layers = [divided(case, host, "cuda") for host in (3, [0, 1, 2, 3, 4, 5, 6], 8)]
    given = batch(case, "cuda")

    def step() -> Tensor:
        hidden = given[0]
        for layer in layers:
            hidden = hidden + layer(hidden, *given[1:])
        return hidden

    graph, out = captured(step)
    for layer in layers:
        layer.load.zero_()
    for seed in range(6):
        new_values(given, seed)
        graph.replay()
        torch.cuda.synchronize()
        found = out.clone()
        assert torch.equal(found, step()), seed
    assert all(layer.load.sum() == 2 * 6 * given[1].numel() for layer in layers)
    w = whole(case, "cuda")
    expected = given[0]
    for _ in layers:
        expected = expected + result(w, (expected, *given[1:]), torch.bfloat16)
    assert distance(found, expected) < 2 * CLOSE


def test_a_graph_goes_on_after_experts_were_exchanged() -> None:
    case = Case(experts=8, hidden=256, inter=128, tokens=4, act_format="nvfp4", input_scale="expert")
    layer, given = divided(case, 3, "cuda"), batch(case, "cuda")
    graph, out = captured(lambda: layer(*given))
    new_values(given, 1)
    graph.replay()
    before = out.clone()
    layer.rebalance([0, 1, 2])
    graph.replay()
    torch.cuda.synchronize()
    assert layer.split.host == (0, 1, 2) and distance(out, before) < 4 * CLOSE
    assert torch.equal(out, layer(*given))


def test_more_rows_than_cross_at_once() -> None:
    case = Case(experts=8, hidden=256, inter=128, tokens=300)
    w, given = whole(case, "cuda"), batch(case, "cuda")
    assert distance(divided(case, 4, "cuda", max_tokens=64)(*given), result(w, given, torch.float32)) < CLOSE


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled(mode: str | None) -> None:
    case = CASES[0]
    layers = [divided(case, host, "cuda") for host in (3, 5)]

    def step(hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        for layer in layers:
            hidden = hidden + layer(hidden, ids, weights)
        return hidden

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, mode=mode)
    given = batch(case, "cuda")
    for seed in range(5):
        new_values(given, seed)
        with torch.no_grad():
            assert distance(compiled(*given), step(*given)) < CLOSE, seed


def test_explains_what_crosses() -> None:
    layer = divided(CASES[0], [0, 2, 3], "cuda")
    text = str(moe.explain(layer))
    assert f"experts: 5 on {layer.device}, 3 on the host" in text and "backend cpu" in text
    assert "512 bytes of bfloat16 hidden states a token" in text and "a host function runs the CPU's kernels" in text
    assert layer.staging.rows(1, 1, torch.bfloat16).hidden_states.is_pinned()
