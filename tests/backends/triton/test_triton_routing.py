"""The routing kernel against torch and against formulas in float64: on the GPU, else in Triton's interpreter."""

from __future__ import annotations

import os
import warnings
from unittest import mock

import pytest
import torch
from problems import Case, make_batch, make_raw
from routing_cases import RoutingCases, methods
from routing_oracle import WITH_BIAS, draw, draw_bias, groups_of, route_row

pytest.importorskip("triton")

import torch_moe_ops as moe
from torch_moe_ops.backends.triton_engine.routing_launch import route_triton
from torch_moe_ops.ops import route as route_op

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
runs_kernels = pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or TRITON_INTERPRET=1"
)


@runs_kernels
class TestTheKernel(RoutingCases):
    device = DEVICE
    rows = 300 if DEVICE == "cuda" else 3

    route = staticmethod(route_triton)


@runs_kernels
@methods
def test_agrees_with_float64_formulas(method: str) -> None:
    top_k, groups = (1 if method == "llama4" else 6), groups_of(method, (4, 2))
    logits, bias = draw(5, 60, seed=1), draw_bias(60, seed=2) if method in WITH_BIAS else None
    ids, weights = route_triton(logits.to(DEVICE), None if bias is None else bias.to(DEVICE), method, top_k, *groups)
    for row in range(5):
        vector = logits[row].double().numpy()
        want_ids, want, gap = route_row(method, vector, top_k, None if bias is None else bias.double().numpy(), *groups)
        assert gap > 1e-6
        assert ids[row].tolist() == want_ids
        torch.testing.assert_close(weights[row].cpu().double(), torch.from_numpy(want), rtol=2e-6, atol=0)


@runs_kernels
def test_the_op_runs_the_kernel() -> None:
    logits, bias = draw(3, 16, seed=1).to(DEVICE), draw_bias(16, seed=1).to(DEVICE)
    want = route_triton(logits, bias, "deepseek_v3", 4, 4, 2, 2.5)
    elsewhere = mock.patch.object(route_op.sm90_router, "takes_logits", lambda *args, **options: False)
    torchs = mock.patch.object(route_op, "route_reference", side_effect=AssertionError("torch's path"))
    with elsewhere, torchs:
        got = moe.route(logits, moe.Routing("deepseek_v3", 4, 4, 2, 2.5, bias))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@runs_kernels
def test_a_monolithic_op_is_its_parts() -> None:
    case = Case(scheme="none", experts=8, hidden=64, inter=32)
    w = moe.prepare(make_raw(case), device=DEVICE, backend="triton")
    x = make_batch(case, DEVICE)[0]
    routing, logits = moe.Routing("renormalize", 2), draw(case.tokens, 8, seed=1).to(DEVICE)
    whole = moe.fused_moe(x, logits, w, routing=routing)
    assert torch.equal(whole, moe.fused_moe_routed(x, *moe.route(logits, routing), w))


def test_a_device_without_the_kernel_says_so_once() -> None:
    reason = "the triton package must be importable, got nothing"
    with mock.patch.object(route_op, "kernel_reason", lambda device: reason):
        decide = route_op._has_kernel.__wrapped__
        with pytest.warns(RuntimeWarning, match=rf"moeq::route: .* on cuda:7: {reason}"):
            assert not decide(torch.device("cuda:7"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nobody expects a CUDA kernel on a CPU
            assert not decide(torch.device("cpu"))
