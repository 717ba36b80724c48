"""Shared experts in the call of the routed ones, on every GPU backend and format: few and many tokens, in a graph."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import pytest
import torch
from gpu_layers import Format, Sizes, as_reference, formats, make_raw, needs_cuda, prepare
from tolerances import layer_bound, relative_l2
from torch import Tensor

import torch_moe_ops as moe

pytestmark = needs_cuda

# 33 experts with the shared one, and 35 of a shared expert three times as large.
SIZES = Sizes(experts=32, top_k=6, hidden=512, inter=256)
ROUTING = moe.Routing("default", SIZES.top_k, routed_scaling_factor=2.5, renormalize=True)
TOKENS = (1, 5, 64, 700)  # decode kernels of one and of a few tokens, between, prefill


class Layer(NamedTuple):
    w: moe.PreparedWeights
    reference: moe.PreparedWeights
    raw: moe.RawWeights


@lru_cache(maxsize=2)
def layer_of(fmt: Format, parts: int) -> Layer:
    routed = make_raw(fmt, SIZES)
    if fmt.act_format != "none" and fmt.input_scale == "none" and parts > 1:
        pytest.skip("one dynamic scale a row of the intermediate: a divided expert has several")
    shared = make_raw(fmt, Sizes(1, 1, SIZES.hidden, parts * SIZES.inter, seed=11))
    raw = moe.with_shared_experts(routed, shared)
    return Layer(prepare(raw, fmt), as_reference(raw, fmt), raw)


def inputs_of(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tokens, SIZES.hidden, generator=g, device="cuda").bfloat16()
    logits = torch.randn(tokens, SIZES.experts, generator=g, device="cuda")
    return x, logits, torch.rand(tokens, 1, generator=g, device="cuda") + 0.25


def check(fmt: Format, layer: Layer, y: Tensor, x: Tensor, logits: Tensor, gate: Tensor) -> None:
    want = moe.fused_moe(x, logits, layer.reference, routing=ROUTING, shared_expert_weights=gate)
    values = x.shape[0] * (SIZES.top_k + layer.w.num_shared_experts) * SIZES.inter
    assert relative_l2(y, want) <= layer_bound(fmt.backend, fmt.act_format, torch.bfloat16, values)


@formats
@pytest.mark.parametrize("parts", [1, 3])
def test_against_the_reference(fmt: Format, parts: int) -> None:
    layer = layer_of(fmt, parts)
    assert layer.w.num_shared_experts == parts
    for tokens in TOKENS if parts == 1 else TOKENS[1::2]:  # each number may compile kernels anew
        x, logits, gate = inputs_of(tokens)
        y = moe.fused_moe(x, logits, layer.w, routing=ROUTING, shared_expert_weights=gate)
        check(fmt, layer, y, x, logits, gate)


@formats
def test_in_a_graph(fmt: Format) -> None:
    layer = layer_of(fmt, 1)
    for tokens in (1, 64):
        x, logits, gate = inputs_of(tokens)
        moe.fused_moe(x, logits, layer.w, routing=ROUTING, shared_expert_weights=gate)  # compiles and allocates
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = moe.fused_moe(x, logits, layer.w, routing=ROUTING, shared_expert_weights=gate)
        for seed in (1, 2, 3):
            for old, new in zip((x, logits, gate), inputs_of(tokens, seed), strict=True):
                old.copy_(new)
            graph.replay()
            check(fmt, layer, y, x, logits, gate)
