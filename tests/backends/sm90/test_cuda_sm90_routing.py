"""Routing by the Hopper kernels against torch, on a GPU of compute capability 9.0: alone, and inside of a layer."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from routing_cases import RoutingCases, methods
from routing_oracle import WITH_BIAS, draw, draw_bias, groups_of
from sm90_cases import in_tiles, make_call, why_not_here
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.backends import cuda_sm90
from torch_moe_ops.backends.sm90.common import router_of
from torch_moe_ops.backends.sm90.router import takes_logits
from torch_moe_ops.routing.reference import route_reference

REASON = why_not_here()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(REASON), reason=REASON or "it is there")]


def complete(*routing: Any) -> tuple[Any, ...]:
    """All arguments of moeq::route."""
    return (*routing, *(0, 0, 1.0, None)[len(routing) - 4 :])


def route(logits: Tensor, *options: Any, shared: tuple[int, Tensor | None] = (0, None)) -> tuple[Tensor, Tensor]:
    """(ids, weights) of the kernel, from buffers full of what is no result. Arguments as route_triton's."""
    router = router_of(complete(logits, *options))
    assert router is not None
    number, of_shared = shared
    ids = torch.full((logits.shape[0], router.top_k + number), -7, dtype=torch.int32, device="cuda")
    weights = torch.full(ids.shape, math.nan, device="cuda")
    of_shared = None if of_shared is None else of_shared.contiguous()
    torch.ops.moeq_C.route_sm90(*router, ids, weights, number, of_shared)
    return ids, weights


class TestTheKernel(RoutingCases):
    device = "cuda"
    rows = 300

    route = staticmethod(route)


OTHERS = ("torch_moe_ops.ops.route.route_reference", "torch_moe_ops.ops.route._has_kernel")


@methods
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_the_op_runs_the_kernel(method: str, dtype: torch.dtype) -> None:
    """And does not wait for the device, nor ask for Triton's kernel or torch's operations."""
    logits = draw(40, 64, seed=1).to(dtype).cuda()
    bias = draw_bias(64, seed=1).cuda() if method in WITH_BIAS else None
    options = (method, 1 if method == "llama4" else 8, *groups_of(method, (2, 1)), 1.0, None)
    number = 0 if method == "llama4" else 2
    shared = (number, torch.rand(number, 40, device="cuda").T if number else None)  # of any strides
    want = route(logits, bias, *options, shared=shared)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with mock.patch(OTHERS[0], side_effect=AssertionError), mock.patch(OTHERS[1], side_effect=AssertionError):
            got = torch.ops.moeq.route(logits, bias, *options, *shared)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_sigmoids_over_the_range_that_has_quotients_above_zero() -> None:
    """Bit for bit those of a division, whatever the mantissa; one expert, so that a token is one of them."""
    logits = torch.linspace(-89, 20, 1 << 22, device="cuda")[:, None]
    ids, weights = torch.ops.moeq.route(logits, None, "sigmoid", 1, renormalize=False)
    assert not ids.any() and torch.equal(weights, route_reference(logits, None, "sigmoid", 1, 0, 0, 1.0, False)[1])
    assert weights[0] < 2.0**-126 < weights[1 << 17]  # subnormal, and not


def test_groups_of_other_sizes_are_triton_s() -> None:
    assert takes_logits(torch.empty(1, 256, device="cuda"), 8) and takes_logits(torch.empty(1, 160, device="cuda"), 1)
    assert not takes_logits(torch.empty(1, 160, device="cuda"), 8)
    with mock.patch("torch_moe_ops.backends.triton.package_reason", lambda: "it is not there"):
        assert takes_logits(torch.empty(1, 160, device="cuda"), 8)


def test_the_op_takes_more_groups_than_the_kernel() -> None:
    logits = draw(3, 128, seed=1).cuda()
    ids, weights = torch.ops.moeq.route(logits, None, "renormalize", 2, 64, 3)
    want_ids, want = route_reference(logits, None, "renormalize", 2, 64, 3)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want, rtol=1e-6, atol=0)


def layer(act_format: str = "none") -> moe.PreparedWeights:
    g = torch.Generator().manual_seed(0)
    w13, w2 = torch.randn(16, 256, 256, generator=g) / 16, torch.randn(16, 256, 128, generator=g) / 11
    raw = moe.quantize_experts(w13.bfloat16(), w2.bfloat16(), "nvfp4").to("cuda")
    return moe.prepare(raw, act_format=act_format, backend="cuda_sm90")


def batch(tokens: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    x = torch.randn(tokens, 256, generator=torch.Generator().manual_seed(seed)).bfloat16().cuda()
    return x, draw(tokens, 16, seed).bfloat16().cuda()


@methods
@pytest.mark.parametrize("tokens", (1, 7, 20, 100))
def test_a_layer_from_logits_is_its_parts(method: str, tokens: int) -> None:
    """Weights may differ by a rounding, and so may the layer: by less than what a wrong expert would do."""
    w, (x, logits) = layer(), batch(tokens)
    bias = draw_bias(16, seed=4).cuda() if method in WITH_BIAS else None
    groups = groups_of(method, (4, 3))
    routing = moe.Routing(method, 1 if method == "llama4" else 3, *groups, bias=bias)
    whole = moe.fused_moe(x, logits, w, routing=routing, out_dtype=torch.float32).double()
    ids, weights = moe.route(logits, routing)
    options = {"backend": "cuda_sm90", "act_format": "none", "router_weight_on_input": method == "llama4"}
    given = (x, None, ids, weights, *w.op_weights())
    parts = torch.ops.moeq.nvfp4_moe_routed(*given, **options, out_dtype=torch.float32).double()
    assert (whole - parts).norm() <= 2e-4 * parts.norm()


@pytest.mark.parametrize("act_format", ("none", "nvfp4"))
@pytest.mark.parametrize("tokens", (1, 8, 33, 200))
def test_a_replay_follows_the_logits(act_format: str, tokens: int) -> None:
    w, (x, logits) = layer(act_format), batch(tokens)
    routing = moe.Routing("renormalize", 2)
    moe.fused_moe(x, logits, w, routing=routing)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe.fused_moe(x, logits, w, routing=routing)
    for seed in range(2, 6):
        for mine, other in zip((x, logits), batch(tokens, seed), strict=True):
            mine.copy_(other)
        if seed == 5:
            logits[:, 3] = 100.0  # all tokens to one expert
        graph.replay()
        assert torch.equal(out, moe.fused_moe(x, logits, w, routing=routing))


def test_more_groups_than_the_kernels_route() -> None:
    routing = moe.Routing("renormalize", 2, 64, 3)
    assert router_of(complete(torch.zeros(1, 128), None, "renormalize", 2, 64, 3)) is None
    call = make_call("nvfp4", hidden=128, inter=64, experts=128, tokens=3)
    out = torch.empty(3, 128, dtype=torch.bfloat16, device="cuda")
    options = (draw(3, 128, seed=1).cuda(), None, "renormalize", 2)
    assert not cuda_sm90.run_monolithic(in_tiles(call), complete(*options, routing.n_group, routing.topk_group), out)
    assert cuda_sm90.run_monolithic(in_tiles(call), complete(*options, 32, 2), out)


def test_ranks_of_experts_from_logits() -> None:
    """A rank's experts alone, and what the other ranks add."""
    call = make_call("nvfp4", hidden=128, inter=64, experts=32, tokens=9, out_dtype=torch.float32)
    logits = draw(9, 32, seed=3).cuda()
    ids, weights = route_reference(logits, None, "renormalize", 4)
    whole = torch.empty(9, 128, device="cuda")
    cuda_sm90.run(in_tiles(call)._replace(topk_ids=ids, topk_weights=weights), whole)
    parts = torch.zeros_like(whole)
    names = ("w13", "w13_scale", "g1_alphas", "w2", "w2_scale", "g2_alphas")
    for offset in range(0, 32, 8):
        mine: dict[str, Any] = {name: getattr(call, name)[offset : offset + 8].contiguous() for name in names}
        part = torch.empty_like(whole)
        rank = in_tiles(call._replace(**mine, local_expert_offset=offset))
        assert cuda_sm90.run_monolithic(rank, complete(logits, None, "renormalize", 4), part)
        parts += part
    assert (parts - whole).norm() <= 1e-5 * whole.norm()
