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
from triton_passes import INT4_SCALES, LAYER, make_call, with_int4_scales

from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.backends.triton_engine.backward_pass import Pass
from torch_moe_ops.core.activations import apply_activation
from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.core.layout import Sizes
from torch_moe_ops.gradients import chunks, experts, layer_pass, lora, lora_layer, on_gpu
from torch_moe_ops.gradients.lora import LoraArguments
from torch_moe_ops.gradients.lora_layer import WantedLora
from torch_moe_ops.gradients.weights import decode_experts
from torch_moe_ops.weights.raw_weights import RawWeights

pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or TRITON_INTERPRET=1"
)
BOUND = 6e-3
# Where gate and up have alphas of their own, w13 is rounded to bfloat16 with them; measured on an H100: 6.3e-3.
BOUND_OF_HALVES = 7e-3
ALL = WantedLora(True, True, True, True, True, True, True, True)


def _on_it(monkeypatch: pytest.MonkeyPatch, serves: bool) -> None:
    """Whether Triton's kernels run; if not, products in float32."""
    monkeypatch.setattr(experts, "triton_serves", lambda rows: serves)
    for module in (layer_pass, lora):
        monkeypatch.setattr(module, "product_dtype", lambda rows: torch.bfloat16 if serves else torch.float32)


def _few(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Up to how many rows of an expert Triton's kernels multiply packed weights."""
    for name in ("FEW_ROWS", "FEW_ROWS_BY_SLOT"):
        monkeypatch.setattr(on_gpu, name, rows)


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
        decodes = replace(BACKENDS[backend], rows_by_slot=None)
        own = decodes if serves else replace(decodes, dequantize=None)
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
    _check_few_rows(call, sizes, raw, backend, monkeypatch)


@pytest.mark.parametrize(("dtype", "zero", "group"), INT4_SCALES, ids=str)
def test_few_rows_of_int4_with_zero_points_or_other_scales(
    dtype: torch.dtype, zero: bool, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, backend = replace(LAYER, scheme="int4", inter=64, tokens=1), "cuda_sm90_int4"
    raw = with_int4_scales(make_raw(case), dtype, zero, group)
    _check_few_rows(*make_call(case, backend, **BACKENDS[backend].prepare(raw)), raw, backend, monkeypatch)


def _check_few_rows(
    call: ExpertsCall, sizes: Sizes, raw: RawWeights, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = factors_of(raw, 1, 6, torch.bfloat16).to(DEVICE)
    scaling = torch.full((1,), 0.5, device=DEVICE)
    arguments = LoraArguments(given.a13, given.b13, given.a2, given.b2, scaling, None)
    _on_it(monkeypatch, False)
    expected = lora_layer.lora_layer(call, replace(BACKENDS[backend], dequantize=None), sizes, arguments)
    _on_it(monkeypatch, True)
    decodes = replace(BACKENDS[backend], few_rows=None, rows_by_slot=None)
    decoded = lora_layer.lora_layer(call, decodes, sizes, arguments)
    _few(monkeypatch, 100)
    monkeypatch.setattr(chunks, "decoder_of", None)
    found, again = (lora_layer.lora_layer(call, BACKENDS[backend], sizes, arguments) for _ in range(2))
    print(f"{raw.scheme} {relative_l2(found, expected):.2e}, decoded {relative_l2(decoded, expected):.2e}")
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
    monkeypatch.setattr(chunks, "at_once_on_gpu", lambda *sizes: 2)
    _few(monkeypatch, 0)
    _check(case, backend, adapters, rank, monkeypatch)


def test_hidden_states_in_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "SHARE_OF_WEIGHTS", 1 << 20)
    _few(monkeypatch, 0)
    _check(replace(LAYER, hidden=384, foreign=True), "cuda_sm90", 2, 8, monkeypatch)


@pytest.mark.parametrize("scheme", ["fp8_block", "mxfp8"])
def test_tiles_of_bytes_are_decoded_to_memory(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few tokens there are: the kernel of few rows reads tiles of 4-bit codes."""
    _few(monkeypatch, 100)
    _check(replace(LAYER, scheme=scheme, inter=96), "cuda_sm90", 1, 4, monkeypatch)


class _StandIn:
    """What kernels of a layer's own do (Backend.rows_by_slot), in float32, slot by slot."""

    def __init__(self, p: Pass) -> None:
        self.p, self.h = p, torch.zeros(p.slots.order.shape[0], p.sizes.intermediate_size, device=p.x.device)
        experts = slice(0, p.sizes.num_experts)
        self.w13, self.w2 = decode_experts(p.call, BACKENDS["cuda_sm90"], p.sizes, experts, torch.float32)

    def _slots(self) -> list[tuple[int, int]]:
        """(slot, local expert) of those that are here."""
        first, count = self.p.call.local_expert_offset, self.p.sizes.num_experts
        numbers = enumerate(self.p.call.topk_ids.flatten().tolist())
        return [(slot, number - first) for slot, number in numbers if 0 <= number - first < count]

    def _row(self, w: Tensor, x: Tensor, bias: Tensor | None, addend: Any, slot: int, expert: int) -> Tensor:
        y = w[expert] @ x
        if addend is not None:
            assert addend.factor.shape[2] % 8 == 0
            low = addend.low[slot].float().sum(1).flatten()
            assert not low[addend.factor.shape[2] :].any()
            y = y + addend.factor[expert].float() @ low[: addend.factor.shape[2]]
        return y if bias is None else y + bias[expert]

    def hidden(self, addend: Any, out: Tensor | None) -> None:
        call, top_k = self.p.call, self.p.call.topk_ids.shape[1]
        constants = (call.swiglu_alpha, call.swiglu_beta, call.swiglu_limit)
        for slot, expert in self._slots():
            z = self._row(self.w13, self.p.x[slot // top_k].float(), self.p.biases[0], addend, slot, expert)
            gate, up = z.chunk(2) if self.p.sizes.is_gated else (None, z)
            self.h[slot] = apply_activation(call.activation, gate, up, *constants).to(torch.bfloat16)
            if out is not None:
                out[slot] = self.h[slot].to(torch.bfloat16)

    def output(self, addend: Any, out: Tensor) -> None:
        for slot, expert in self._slots():
            out[slot] = self._row(self.w2, self.h[slot], self.p.biases[1], addend, slot, expert).to(torch.bfloat16)


SLOTS = (
    (replace(LAYER, inter=64, bias=True, foreign=True), 1, 6),
    (replace(LAYER, tokens=70, activation="swigluoai", foreign=True), 3, 5),
    (replace(LAYER, inter=64, top_k=1, bias=True), 1, 20),
    (replace(LAYER, inter=64), 2, 20),
)


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("only", [("a13", "b13", "a2", "b2"), ("a13", "b13"), ("a2", "b2")], ids="-".join)
@pytest.mark.parametrize(("case", "adapters", "rank"), SLOTS, ids=str)
def test_rows_by_slot(
    case: Case, adapters: int, rank: int, only: tuple[str, ...], on_input: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer whose own kernels take an addend and leave their rows: adapters are added before and after them."""
    if on_input and case.top_k > 1:
        pytest.skip("router_weight_on_input is for one expert a token")
    backend, raw = "cuda_sm90", make_raw(case)
    fields = {"router_weight_on_input": on_input}
    call, sizes = make_call(case, backend, w13_bias=raw.w13_bias, w2_bias=raw.w2_bias, **fields)
    given = factors_of(raw, adapters, rank, torch.bfloat16)
    factors = [getattr(given, name).to(DEVICE) if name in only else None for name in ("a13", "b13", "a2", "b2")]
    ids = (torch.arange(case.tokens) % (adapters + 1)).int().to(DEVICE) - 1 if adapters > 1 else None
    arguments = LoraArguments(*factors, torch.as_tensor(given.scaling).float().reshape(-1).to(DEVICE), ids)
    _few(monkeypatch, 0)
    _on_it(monkeypatch, False)
    expected = lora_layer.lora_layer(call, replace(BACKENDS[backend], dequantize=None), sizes, arguments)
    _on_it(monkeypatch, True)
    monkeypatch.setattr(chunks, "decoder_of", None)  # nothing is decoded to memory
    own = replace(BACKENDS[backend], rows_by_slot=_StandIn)
    found, again = (lora_layer.lora_layer(call, own, sizes, arguments) for _ in range(2))
    print(f"by slot {relative_l2(found, expected):.2e}")
    assert relative_l2(found, expected) <= BOUND
    assert torch.equal(found, again)


@pytest.mark.parametrize(("tokens", "takes"), [(2, "few"), (3, "by slot"), (65, "by slot")])
def test_which_kernels_multiply_packed_weights(tokens: int, takes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the layer itself, but for so few rows that most experts have none, which only Triton's leave out."""
    case = replace(LAYER, tokens=tokens, top_k=1, experts=int(2 / on_gpu.FEW_ROWS_BY_SLOT))
    raw = make_raw(case)
    call, sizes = make_call(case, "cuda_sm90")
    given = factors_of(raw, 1, 4, torch.bfloat16).to(DEVICE)
    arguments = LoraArguments(given.a13, given.b13, given.a2, given.b2, torch.ones(1, device=DEVICE), None)
    _on_it(monkeypatch, True)
    asked: list[str] = []
    own = BACKENDS["cuda_sm90"]
    few_rows, by_slot = own.few_rows, _StandIn
    assert few_rows is not None
    taking = replace(
        own,
        few_rows=lambda *a: asked.append("few") or few_rows(*a),  # type: ignore[func-returns-value]
        rows_by_slot=lambda p: asked.append("by slot") or by_slot(p),  # type: ignore[func-returns-value]
    )
    lora_layer.lora_layer(call, taking, sizes, arguments)
    assert set(asked) == {takes}
    asked.clear()
    if tokens <= on_gpu.FEW_ROWS * case.experts:  # where the layer's own kernels do not run it
        none = replace(taking, rows_by_slot=lambda p: None)
        lora_layer.lora_layer(call, none, sizes, arguments)
        assert set(asked) == {"few"}


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
    _few(monkeypatch, few_rows)

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
