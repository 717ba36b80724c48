"""Gradients on a GPU: every backend and format against the same layer's on a CPU in float32, captured, compiled."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_layers import GPU_BACKENDS, Format, formats_of, needs_cuda
from problems import Case, make_batch, make_raw
from tolerances import relative_l2
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.backends import cuda_sm90

pytestmark = [pytest.mark.gpu, needs_cuda]
BOUND = 6e-3
# Of routing weights, where values of the quantized intermediate move to the next code: what is recomputed has factors
# that were rounded to bfloat16. Measured: 2.0e-2 to 3.7e-2.
MOVED = 5e-2
FLOAT16 = 8e-3  # its factors are rounded to bfloat16; measured: 6.8e-3
SIZES: dict[str, Any] = {
    "tokens": 70,
    "experts": 6,
    "top_k": 3,
    "hidden": 256,
    "inter": 128,
    "foreign": True,
    "bias": True,
}


def _case(f: Format) -> Case:
    return Case(
        scheme=f.scheme, act_format=f.act_format, input_scale=f.input_scale, weight_policy=f.weight_policy, **SIZES
    )


def _gradients(w: moe.PreparedWeights, x: Tensor, ids: Tensor, weights: Tensor, grad: Tensor) -> list[Tensor]:
    biased = {
        name: t.clone().requires_grad_() for name in ("w13_bias", "w2_bias") if (t := getattr(w, name)) is not None
    }
    leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_(), *biased.values()]
    out = moe.fused_moe_routed(leaves[0], ids, leaves[1], dataclasses.replace(w, **biased))
    return list(torch.autograd.grad(out, leaves, grad.to(out.dtype)))


def _check(w: moe.PreparedWeights, case: Case) -> None:
    raw = make_raw(case)
    x, ids, weights = make_batch(case)
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(case.dtype)
    on_cpu = moe.prepare(raw, act_format=case.act_format, backend="reference", weight_policy=case.weight_policy)
    expected = _gradients(on_cpu, x, ids, weights, grad)
    moved = (x.cuda(), ids.cuda(), weights.cuda(), grad.cuda())
    found = _gradients(w, *moved)
    base = FLOAT16 if case.dtype == torch.float16 else BOUND
    bounds = (base, base if case.act_format == "none" else MOVED, base, base)
    for got, want, bound in zip(found, expected, bounds, strict=False):
        if got.shape != want.shape:  # a bias whose rows the layout pads
            got = got.unflatten(1, (-1, got.shape[1] * case.inter // want.shape[1]))[:, :, : case.inter].flatten(1)
        assert relative_l2(got, want) <= bound
    assert all(torch.equal(a, b) for a, b in zip(found, _gradients(w, *moved), strict=True))


FORMATS = [f for name in GPU_BACKENDS for f in formats_of(name)]


@pytest.mark.parametrize("f", FORMATS, ids=str)
def test_every_format(f: Format) -> None:
    case = _case(f)
    raw = make_raw(case)
    against = moe.explain(raw, **f.settings()).against[f.backend]
    if against:
        pytest.skip("; ".join(against))
    _check(moe.prepare(raw, backend=f.backend, **f.settings()), case)


@pytest.mark.parametrize("changes", [{"tokens": 1}, {"dtype": torch.float16}, {"hidden": 72, "inter": 40}], ids=str)
def test_sizes(changes: dict[str, Any]) -> None:
    case = Case(**{**SIZES, "scheme": "none", **changes})
    _check(moe.prepare(make_raw(case), backend="triton", device="cuda"), case)


@pytest.mark.parametrize("f", [f for f in FORMATS if f.backend in ("cuda_sm90", "cuda_sm90_int4")], ids=str)
def test_halves_of_tokens_have_the_bits_of_all(f: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a forward pass that a backward pass will follow."""
    case = replace(_case(f), tokens=1500)
    raw = make_raw(case)
    against = moe.explain(raw, **f.settings()).against[f.backend]
    if against:
        pytest.skip("; ".join(against))
    w, batch = moe.prepare(raw, backend=f.backend, **f.settings()), [t.cuda() for t in make_batch(case)]
    runs: list[int] = []
    real = cuda_sm90.run_kernel
    monkeypatch.setattr(cuda_sm90, "run_kernel", lambda *given: runs.append(len(given[1])) or real(*given))
    monkeypatch.setattr(cuda_sm90, "_LEAST_TOKENS", 1)
    whole = moe.fused_moe_routed(*batch, w)
    found = moe.fused_moe_routed(batch[0].requires_grad_(), *batch[1:], w)
    # On fp8 tensor cores (sm90/fp8_products.py) a call is one, whatever follows.
    assert runs == ([] if (f.scheme, f.act_format) == ("int4", "fp8") else [1500, 768, 732])
    assert torch.equal(found, whole)


@pytest.mark.parametrize("scheme", ["nvfp4", "none"])
def test_captured(scheme: str) -> None:
    """A step in a CUDA graph: nothing waits for the device, and other tokens and routing replay right."""
    case = replace(Case(**SIZES), scheme=scheme, act_format="none", tokens=64)
    w = moe.prepare(make_raw(case), act_format="none", device="cuda")
    x, ids, weights = (t.cuda() for t in make_batch(case))
    grad = torch.randn_like(x)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            _gradients(w, x, ids, weights, grad)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _gradients(w, x, ids, weights, grad)
    for seed in (5, 6):
        for into, value in zip((x, ids, weights), make_batch(replace(case, seed=seed)), strict=True):
            into.copy_(value)
        graph.replay()
        for got, want in zip(captured, _gradients(w, x, ids, weights, grad), strict=True):
            assert relative_l2(got, want) <= BOUND


def test_compiled_with_graphs() -> None:
    case = replace(Case(**SIZES), foreign=False)
    w = moe.prepare(make_raw(case), act_format="none", device="cuda")
    x, ids, weights = (t.cuda() for t in make_batch(case))

    def step(x: Tensor) -> Tensor:
        return moe.fused_moe_routed(x * 2, ids, weights, w).float().square().sum()

    found = []
    for run in (step, torch.compile(step, fullgraph=True)):
        leaf = x.clone().requires_grad_()
        run(leaf).backward()
        found.append(leaf.grad)
    assert relative_l2(*found) <= BOUND


@pytest.mark.parametrize("projection", ["w13", "w2"])
@pytest.mark.parametrize("f", [f for f in FORMATS if f.input_scale == "none"], ids=str)
def test_grouped_linear(f: Format, projection: str) -> None:
    case = replace(_case(f), bias=False)
    raw = make_raw(case)
    if moe.explain(raw, **f.settings()).against[f.backend]:
        pytest.skip("the layer is none of the backend's")
    ends = torch.tensor([3, 3, 20, 29, 40, 41])
    on_cpu = moe.prepare(raw, act_format=f.act_format, backend="reference", weight_policy=f.weight_policy)
    width = case.hidden if projection == "w13" else case.inter
    x = torch.randn(48, width).bfloat16()
    found = []
    for w in (on_cpu, moe.prepare(raw, backend=f.backend, **f.settings())):
        leaf = x.to(w.device, copy=True).requires_grad_()
        out = moe.grouped_linear(leaf, w, ends.to(w.device), projection=projection)
        out.backward(torch.ones_like(out))
        found.append((out, leaf.grad))
    assert all(relative_l2(b, a) <= BOUND for a, b in zip(*found, strict=True))
