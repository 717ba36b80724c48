"""Layers of few tokens behind kernels of ours that let them begin early, in CUDA graphs (csrc/cuda/sm90/launch/in_front.h)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_graphs import captured
from gpu_layers import FORMATS, Format, Sizes, make_raw, prepare
from graph_edges import driver_version, early_edges
from sm90_cases import why_not_here
from torch import Tensor

import torch_moe_ops as moe

REASON = why_not_here()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(REASON), reason=REASON or "it is there")]

SIZES = Sizes(experts=16, top_k=4, hidden=2048, inter=256)
ROUTING = moe.Routing("renormalize", SIZES.top_k)
LAYERS, REPLAYS = 4, 12
HOPPER = [fmt for fmt in FORMATS if fmt.backend.startswith("cuda_sm90")]
NVFP4 = Format("cuda_sm90", "nvfp4", "none", "none", "exact")
Chain = Callable[[], Tensor]


def chain_of(x: Tensor, gate: Tensor, w: moe.PreparedWeights, monolithic: bool) -> Chain:
    """Layers behind each other. Each routes by what the one in front gives, in a launch that lets the layer begin
    early."""

    def run() -> Tensor:
        rows = x
        for _ in range(LAYERS):
            logits = (rows[:, None].float() * gate).sum(-1)  # the same bits in a graph and without
            if monolithic:
                rows = moe.fused_moe(rows, logits, w, routing=ROUTING)
            else:
                rows = moe.fused_moe_routed(rows, *moe.route(logits, ROUTING), w)
        return rows

    return run


@pytest.mark.parametrize("fmt", HOPPER, ids=str)
@pytest.mark.parametrize("tokens", (1, 2, 8, 20))
@pytest.mark.parametrize("monolithic", (False, True), ids=("routed", "monolithic"))
def test_results_in_a_graph_are_those_without(fmt: Format, tokens: int, monolithic: bool) -> None:
    """Bit for bit, of hidden states and ids that change between replays: a layer that reads either too early has old
    ones."""
    w = prepare(make_raw(fmt, SIZES), fmt)
    x = torch.empty(tokens, SIZES.hidden, dtype=torch.bfloat16, device="cuda").normal_()
    gate = torch.randn(SIZES.experts, SIZES.hidden, device="cuda") * SIZES.hidden**-0.5
    run = chain_of(x, gate, w, monolithic)
    graph, result = captured(run)
    for _ in range(REPLAYS):
        x.normal_()
        graph.replay()
        assert torch.equal(result, run())


@pytest.mark.parametrize("tokens", (1, 8))
def test_which_begin_early(tokens: int) -> None:
    """Behind the layer's own kernel and behind one that routes, and behind nobody else's."""
    w = prepare(make_raw(NVFP4, SIZES), NVFP4)
    x = torch.randn(tokens, SIZES.hidden, dtype=torch.bfloat16, device="cuda")
    logits = torch.randn(tokens, SIZES.experts, device="cuda")
    ids, weights = moe.route(logits, ROUTING)

    def edges(*steps: Callable[[], Any]) -> list[bool]:
        def run() -> Tensor:
            for step in steps:
                step()
            return x

        return early_edges(captured(run, keep_graph=True)[0])

    def layer() -> Tensor:
        return moe.fused_moe_routed(x, ids, weights, w)

    early = driver_version() >= 13000  # no launch does with older ones (in_front.h)
    assert edges(layer, layer, layer) == [early, early]
    assert edges(lambda: x.mul_(1.0), layer) == [False]
    assert edges(layer, lambda: x.mul_(1.0), layer) == [False, False]
    assert edges(lambda: moe.fused_moe(x, logits, w, routing=ROUTING)) == [early]
    assert edges(lambda: moe.fused_moe_routed(x, *moe.route(logits, ROUTING), w)) == [early]


def test_another_stream_is_not_in_front() -> None:
    """A layer behind two streams, one of which ends in a launch of ours, waits for both."""
    w = prepare(make_raw(NVFP4, SIZES), NVFP4)
    x = torch.randn(1, SIZES.hidden, dtype=torch.bfloat16, device="cuda")
    ids, weights = moe.route(torch.randn(1, SIZES.experts, device="cuda"), ROUTING)
    beside = torch.cuda.Stream()

    def run() -> Tensor:
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            x.mul_(1.0)
        moe.fused_moe_routed(x, ids, weights, w)
        torch.cuda.current_stream().wait_stream(beside)
        return moe.fused_moe_routed(x, ids, weights, w)

    assert not any(early_edges(captured(run, keep_graph=True)[0]))
