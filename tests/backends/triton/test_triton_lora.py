"""A pass with adapters by the Triton engine's kernels, on the GPU or in Triton's interpreter."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from lora_cases import factors_of
from problems import Case, make_raw
from tolerances import relative_l2
from torch import Tensor
from triton_cases import DEVICE
from triton_passes import LAYER, make_call

from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.gradients import experts, layer_pass, lora, lora_layer, on_gpu
from torch_moe_ops.gradients.lora import LoraArguments
from torch_moe_ops.gradients.lora_layer import WantedLora

pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or TRITON_INTERPRET=1"
)
BOUND = 6e-3
# Where gate and up have alphas of their own, w13 is rounded to bfloat16 with them.
BOUND_OF_HALVES = 8e-3
ALL = WantedLora(True, True, True, True, True, True, True, True)


def _on_it(monkeypatch: pytest.MonkeyPatch, serves: bool) -> None:
    """Whether Triton's kernels run; if not, products in float32."""
    monkeypatch.setattr(experts, "triton_serves", lambda rows: serves)
    for module in (layer_pass, lora):
        monkeypatch.setattr(module, "product_dtype", lambda rows: torch.bfloat16 if serves else torch.float32)


def _strided(t: torch.Tensor) -> torch.Tensor:
    """The same values, with others between them."""
    return torch.stack((t, t + 1), 1)[:, 0]


def _check(
    case: Case, backend: str, adapters: int, rank: int, monkeypatch: pytest.MonkeyPatch, merged: bool = False,
    only: tuple[str, ...] = ("a13", "b13", "a2", "b2"), dtype: torch.dtype = torch.bfloat16, **fields: Any,
) -> None:  # fmt: skip
    """Forward and backward against the same pass by plain torch in float32; twice, bit for bit."""
    raw = make_raw(case)
    call, sizes = make_call(case, backend, w13_bias=raw.w13_bias, w2_bias=raw.w2_bias, **fields)
    given = factors_of(raw, adapters, rank, dtype)
    g = torch.Generator().manual_seed(8)
    ids = None if adapters == 1 else torch.randint(-1, adapters, (case.tokens,), generator=g).int().to(DEVICE)
    factors = [getattr(given, name).to(DEVICE) if name in only else None for name in ("a13", "b13", "a2", "b2")]
    scaling = torch.as_tensor(given.scaling, dtype=torch.float32).reshape(-1).to(DEVICE)
    arguments = LoraArguments(*factors, scaling, ids, merged)
    grad = torch.randn(call.hidden_states.shape, generator=g).to(DEVICE, case.dtype)
    has = (True, True, raw.w13_bias is not None, raw.w2_bias is not None, *(f is not None for f in factors))
    wanted = WantedLora(*has)

    def run(serves: bool) -> list[Tensor | None]:
        _on_it(monkeypatch, serves)
        own = BACKENDS[backend] if serves else replace(BACKENDS[backend], dequantize=None)
        strided = arguments._replace(scaling=_strided(scaling), ids=None if ids is None else _strided(ids))
        mine = strided if serves else arguments
        out = lora_layer.lora_layer(call, own, sizes, mine)
        return [out, *lora_layer.lora_gradients(call, own, sizes, mine, grad, wanted)]

    expected, found, again = run(False), run(True), run(True)
    names = ("output", *WantedLora._fields)
    for name, got, want, same in zip(names, found, expected, again, strict=True):
        assert (got is None) == (want is None)
        if got is not None and want is not None and same is not None:
            assert got.shape == want.shape
            assert torch.isfinite(got).all()
            print(f"{case.scheme:>8} {name:>14} {relative_l2(got, want):.2e}")
            assert want.any()
            assert relative_l2(got, want) <= (BOUND_OF_HALVES if case.per_half else BOUND), name
            assert torch.equal(got, same)


FEW = (
    (replace(LAYER, tokens=30, inter=64, per_half=True, bias=True, foreign=True), "cuda_sm90"),
    (LAYER, "cuda_sm90"),
    (replace(LAYER, scheme="mxfp4", inter=64, activation="relu2_no_mul", bias=True), "cuda_sm90"),
    (replace(LAYER, scheme="int4", inter=64, tokens=1), "cuda_sm90_int4"),
)


@pytest.mark.parametrize(("case", "backend"), FEW, ids=str)
def test_few_rows(case: Case, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts that few tokens visit are multiplied as they are packed: nothing is decoded to memory."""
    raw = make_raw(case)
    call, sizes = make_call(case, backend, w13_bias=raw.w13_bias, w2_bias=raw.w2_bias)
    given = factors_of(raw, 1, 6, torch.bfloat16).to(DEVICE)
    scaling = torch.full((1,), 0.5, device=DEVICE)
    arguments = LoraArguments(given.a13, given.b13, given.a2, given.b2, scaling, None)
    _on_it(monkeypatch, False)
    expected = lora_layer.lora_layer(call, replace(BACKENDS[backend], dequantize=None), sizes, arguments)
    _on_it(monkeypatch, True)
    decoded = lora_layer.lora_layer(call, replace(BACKENDS[backend], few_rows=None), sizes, arguments)
    monkeypatch.setattr(on_gpu, "FEW_ROWS", 100)
    monkeypatch.setattr(on_gpu, "dequantized", None)
    found, again = (lora_layer.lora_layer(call, BACKENDS[backend], sizes, arguments) for _ in range(2))
    print(f"{case.scheme} {relative_l2(found, expected):.2e}, decoded {relative_l2(decoded, expected):.2e}")
    assert relative_l2(found, expected) <= BOUND
    assert relative_l2(decoded, expected) <= BOUND
    assert torch.equal(found, again)


CASES = (
    (replace(LAYER, foreign=True), "cuda_sm90", 1, 4),
    (replace(LAYER, per_half=True, bias=True, foreign=True), "triton", 2, 5),
    (replace(LAYER, scheme="none", activation="relu2_no_mul", bias=True), "triton", 3, 24),
    (replace(LAYER, scheme="mxfp4", inter=64), "cuda_sm90", 1, 16),
    (replace(LAYER, scheme="int4", inter=64), "cuda_sm90_int4", 2, 40),
    (replace(LAYER, dtype=torch.float16), "triton", 1, 16),
)


@pytest.mark.parametrize(("case", "backend", "adapters", "rank"), CASES, ids=str)
def test_whole_pass(case: Case, backend: str, adapters: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_gpu, "at_once_on_gpu", lambda *sizes: 2)
    monkeypatch.setattr(on_gpu, "FEW_ROWS", 0)
    _check(case, backend, adapters, rank, monkeypatch)


@pytest.mark.parametrize("few_rows", [0, 100])
def test_the_default_dtype_changes_nothing(few_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are often run with one of 16 bits: buffers of float32 must not follow it."""
    case, backend = FEW[0]
    raw = make_raw(case)
    call, sizes = make_call(case, backend, w13_bias=raw.w13_bias, w2_bias=raw.w2_bias)
    given = factors_of(raw, 1, 6, torch.bfloat16).to(DEVICE)
    arguments = LoraArguments(given.a13, given.b13, given.a2, given.b2, torch.full((1,), 0.3, device=DEVICE), None)
    grad = torch.randn(call.hidden_states.shape, generator=torch.Generator().manual_seed(8)).to(DEVICE, case.dtype)
    _on_it(monkeypatch, True)
    monkeypatch.setattr(on_gpu, "FEW_ROWS", few_rows)

    def run() -> list[Tensor | None]:
        out = lora_layer.lora_layer(call, BACKENDS[backend], sizes, arguments)
        return [out, *lora_layer.lora_gradients(call, BACKENDS[backend], sizes, arguments, grad, ALL)]

    plain, before = run(), torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        found = run()
    finally:
        torch.set_default_dtype(before)
    for name, got, want in zip(("output", *WantedLora._fields), found, plain, strict=True):
        assert got is not None and want is not None and got.dtype == want.dtype, name
        assert torch.equal(got, want), name
