"""What surrounds a call must not change it: autocast, matmul precision, grad and inference mode, threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from problems import Case, make_batch, make_raw

import torch_moe_ops as moe

backends = pytest.mark.parametrize("backend", ["reference", "cpu"])
CASE = Case(act_format="nvfp4", input_scale="tensor", hidden=256, inter=128, tokens=9)


def _call(backend: str) -> torch.Tensor:
    w = moe.prepare(make_raw(CASE), act_format="nvfp4", backend=backend)
    x, _, _ = make_batch(CASE)
    logits = torch.randn(CASE.tokens, CASE.experts, generator=torch.Generator().manual_seed(3))
    return moe.fused_moe(x, logits, w, routing=moe.Routing("renormalize", 2))


@backends
def test_autocast(backend: str) -> None:
    plain = _call(backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(_call(backend), plain)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        assert torch.equal(_call(backend), plain)


@backends
def test_float32_matmul_precision(backend: str) -> None:
    plain, before = _call(backend), torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert torch.equal(_call(backend), plain)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


@backends
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_grad_modes(backend: str, mode: type) -> None:
    plain = _call(backend)
    with mode():
        assert torch.equal(_call(backend), plain)


@backends
def test_calls_from_several_threads(backend: str) -> None:
    plain = _call(backend)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(_call, [backend] * 8))
    assert all(torch.equal(result, plain) for result in results)
