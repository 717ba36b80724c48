"""The routing kernel against torch and against formulas in float64: on the GPU, else in Triton's interpreter."""

from __future__ import annotations

import math
import os
import warnings
from unittest import mock

import pytest
import torch
from problems import Case, make_batch, make_raw
from routing_oracle import (
    WITH_BIAS,
    WITH_FACTOR,
    draw,
    draw_bias,
    draw_hostile,
    groups_of,
    methods_and_groups,
    route_row,
)
from torch import Tensor

pytest.importorskip("triton")

import torch_moe_ops as moe
from torch_moe_ops.kernels.triton.routing_launch import route_triton
from torch_moe_ops.ops import route as route_op
from torch_moe_ops.routing import METHODS, ROUTING_METHODS, route_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
runs_kernels = pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or TRITON_INTERPRET=1"
)
methods = pytest.mark.parametrize("method", ROUTING_METHODS)
ROWS = 300 if DEVICE == "cuda" else 3
# Relative: sums in another order (3.4e-7 measured with 512 experts on CUDA), and the interpreter's own exp.
WEIGHTS = 1e-6
# No sum at all, and on CUDA the kernel's exp and log1p are those of torch. (Sums of top_k weights came out the same too.)
BITWISE = ("topk", "llama4", "sigmoid", "topk_sigmoid")


def check(logits: Tensor, bias: Tensor | None, method: str, *options: object) -> None:
    """Equal ids, and weights within WEIGHTS, to torch on the same device; bit for bit where nothing is summed."""
    logits = logits.to(DEVICE)
    bias = None if bias is None else bias.to(DEVICE)
    ids, weights = route_triton(logits, bias, method, *options)  # type: ignore[arg-type]
    want_ids, want = route_reference(logits, bias, method, *options)  # type: ignore[arg-type]
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want, rtol=WEIGHTS, atol=0)
    if method in BITWISE and DEVICE == "cuda":
        assert torch.equal(weights, want)


@runs_kernels
@methods
@pytest.mark.parametrize(
    ("experts", "top_k", "groups"),
    ((1, 1, (0, 0)), (8, 2, (4, 2)), (60, 6, (5, 3)), (160, 6, (8, 3)), (256, 8, (8, 4)), (512, 22, (0, 0))),
)
def test_agrees_with_torch(method: str, experts: int, top_k: int, groups: tuple[int, int]) -> None:
    logits = draw(ROWS, experts, seed=experts)
    bias = draw_bias(experts, seed=3) if method in WITH_BIAS else None
    factor = 2.5 if method in WITH_FACTOR else 1.0
    check(logits, bias, method, 1 if method == "llama4" else top_k, *groups_of(method, groups), factor)


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
@pytest.mark.parametrize("renormalize", (True, False))
@pytest.mark.parametrize("method", [name for name, m in METHODS.items() if m.can_choose_renormalize])
def test_renormalize_overrides_the_method(method: str, renormalize: bool) -> None:
    check(draw(3, 60, seed=2), None, method, 6, 0, 0, 1.0, renormalize)


@runs_kernels
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@methods
def test_low_precision_and_strided_logits(method: str, dtype: torch.dtype) -> None:
    top_k = 1 if method == "llama4" else 6
    bias = draw_bias(96, seed=2) if method in WITH_BIAS else None
    logits = draw(3, 96, seed=3).to(dtype)
    wide = torch.zeros(3, 192, dtype=dtype)
    wide[:, ::2] = logits
    # Values that repeat in these dtypes make ties, which rounding must not break.
    for same in (logits, wide[:, ::2], logits.t().contiguous().t()):
        check(same, bias, method, top_k)


@runs_kernels
@methods
def test_ties_go_to_the_lowest_index(method: str) -> None:
    for experts in (8, 60, 2048):
        k = 1 if method == "llama4" else min(32, experts)
        ids, _ = route_triton(torch.zeros(2, experts, device=DEVICE), None, method, k)
        assert ids.tolist() == [list(range(k))] * 2
    logits = torch.tensor([[1.0, 3.0, -0.0, 3.0, 0.0, 1.0, -0.0, -2.0]], device=DEVICE)
    want = [1, 3, 0, 5, 2, 4, 6, 7]
    k = 1 if method == "llama4" else 8
    assert route_triton(logits, None, method, k)[0].tolist() == [want[:k]]


@runs_kernels
def test_ties_between_groups_go_to_the_lowest_group() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0, 0.0]], device=DEVICE)
    ids, _ = route_triton(logits, torch.zeros(6, device=DEVICE), "deepseek_v3", 4, 3, 2)
    assert ids.tolist() == [[1, 2, 0, 3]]


@runs_kernels
@methods
def test_rows_of_nan(method: str) -> None:
    k = 1 if method == "llama4" else 10
    for bias in (None, draw_bias(60, seed=1).to(DEVICE)) if method in WITH_BIAS else (None,):
        for groups in {(0, 0), groups_of(method, (4, 3))}:
            ids, weights = route_triton(torch.full((2, 60), math.nan, device=DEVICE), bias, method, k, *groups)
            assert ids.tolist() == [list(range(k))] * 2
            assert not weights.any()


@runs_kernels
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in which the interpreter computes
@pytest.mark.parametrize(("method", "groups"), methods_and_groups((6, 3)))
def test_hostile_logits(method: str, groups: tuple[int, int]) -> None:
    g = torch.Generator().manual_seed(0)
    bias = draw_bias(60, seed=1) if method in WITH_BIAS else None
    for fewer in range(4):
        logits = draw_hostile(ROWS, 60, g, fewer)
        check(logits, bias, method, 1 if method == "llama4" else 10, *groups)


@runs_kernels
def test_subnormal_probabilities_keep_their_order() -> None:
    """DeepSeek-V2's router after one dominant logit."""
    logits = torch.tensor([[-95.0, 0.0, -90.0, -92.0, -100.0]], device=DEVICE)
    assert route_triton(logits, None, "default", 5)[0].tolist() == [[1, 2, 3, 0, 4]]


@runs_kernels
def test_groups_are_chosen_by_two_best_with_a_bias_and_by_the_best_without() -> None:
    logits = torch.tensor([[2.0, 2.0, 3.0, -9.0]], device=DEVICE)
    assert route_triton(logits, None, "renormalize", 2, 2, 1)[0].tolist() == [[2, 3]]
    zero = torch.zeros(4, device=DEVICE)
    assert route_triton(logits, zero, "deepseek_v3", 2, 2, 1)[0].tolist() == [[0, 1]]


@runs_kernels
def test_no_tokens() -> None:
    ids, weights = route_triton(torch.zeros(0, 8, device=DEVICE), None, "renormalize", 2)
    assert ids.shape == weights.shape == (0, 2)


@runs_kernels
def test_the_op_runs_the_kernel() -> None:
    logits, bias = draw(3, 16, seed=1).to(DEVICE), draw_bias(16, seed=1).to(DEVICE)
    want = route_triton(logits, bias, "deepseek_v3", 4, 4, 2, 2.5)
    with mock.patch.object(route_op, "route_reference", side_effect=AssertionError("torch's path")):
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


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@methods
def test_a_replay_follows_the_logits(method: str) -> None:
    logits = draw(40, 64, seed=1).to(DEVICE)
    bias = draw_bias(64, seed=1).to(DEVICE) if method in WITH_BIAS else None
    options = (method, 1 if method == "llama4" else 8, *groups_of(method, (8, 4)))
    torch.ops.moeq.route(logits, bias, *options)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.ops.moeq.route(logits, bias, *options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.ops.moeq.route(logits, bias, *options)
    for seed in range(2, 5):
        logits.copy_(draw(40, 64, seed=seed))
        graph.replay()
        eager = torch.ops.moeq.route(logits, bias, *options)
        assert all(torch.equal(a, b) for a, b in zip(captured, eager, strict=True))
