"""The Triton engine's kernels of a backward pass, on the GPU or in Triton's interpreter."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from problems import Case, make_raw
from tolerances import relative_l2
from triton_cases import DEVICE
from triton_passes import INT4_SCALES, LAYER, make_call, with_int4_scales

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.backends.triton_engine import backward_launch, grouped
from torch_moe_ops.core.activations import ACTIVATIONS, apply_activation
from torch_moe_ops.core.problem import Problem
from torch_moe_ops.core.schemes import SCHEMES
from torch_moe_ops.gradients import chunks, experts, layer_pass, linear, on_gpu, products
from torch_moe_ops.gradients.activations import activation_gradients
from torch_moe_ops.gradients.experts import Wanted
from torch_moe_ops.gradients.pairs import Piece
from torch_moe_ops.gradients.weights import decode_projection, decoder_of, projection_of

pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or TRITON_INTERPRET=1"
)
BOUND = 6e-3


def check(case: Case, backend: str, wanted: Wanted, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    """Against the same pass by plain torch in float32; twice, bit for bit."""
    call, sizes = make_call(case, backend, **fields)
    grad = torch.randn(call.hidden_states.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE, case.dtype)
    plain = replace(BACKENDS[backend], dequantize=None)
    monkeypatch.setattr(experts, "triton_serves", lambda rows: False)
    monkeypatch.setattr(layer_pass, "product_dtype", lambda rows: torch.float32)
    expected = experts.experts_gradients(call, plain, sizes, grad, wanted)
    monkeypatch.setattr(experts, "triton_serves", lambda rows: True)
    found, again = (experts.experts_gradients(call, BACKENDS[backend], sizes, grad, wanted) for _ in range(2))
    for name, got, want, same in zip(Wanted._fields, found, expected, again, strict=True):
        assert (got is None) == (want is None) == (not getattr(wanted, name))
        if got is not None:
            assert got.shape == want.shape
            assert torch.isfinite(got).all()
            print(f"{case.scheme:>11} {case.activation:>13} {name:>13} {relative_l2(got, want):.2e}")
            assert relative_l2(got, want) <= BOUND
            assert torch.equal(got, same)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str) -> None:
    """GEMM1 and what follows it in its tiles, written in float32, against the formulas in torch."""
    case = replace(LAYER, scheme="none", activation=activation, bias=True, foreign=True)
    raw = make_raw(case, DEVICE)
    call, sizes = make_call(case, "triton", w13_bias=raw.w13_bias, w2_bias=raw.w2_bias)
    assert raw.w13_bias is not None
    assert raw.w2_bias is not None
    g = torch.Generator().manual_seed(4)
    columns, slots = raw.w13.shape[1], call.topk_ids.numel()
    u, z = torch.randn(slots, case.inter, generator=g).to(DEVICE), torch.full((slots, columns), 7.0, device=DEVICE)
    factor = (torch.rand(3, 2 if raw.is_gated else 1, generator=g) + 0.5).to(DEVICE)
    grad = torch.randn(call.hidden_states.shape, generator=g).to(DEVICE, torch.bfloat16)
    p = on_gpu.make_pass(call, sizes, grad, call.hidden_states, (raw.w13_bias, raw.w2_bias))
    parts, h, kept = backward_launch.parts_of(p, u), torch.full_like(u, 7.0), u.clone()
    for some in (slice(0, 2), slice(2, 3)):
        weights = raw.w13[some]
        own = weights, some.start, some.stop - some.start
        backward_launch.Hidden(p, factor, h, None)(*own)
        backward_launch.Hidden(p, factor, kept, None, z, parts)(*own)
    dw = backward_launch.weights_gradient(p, parts)

    constants = (call.swiglu_alpha, call.swiglu_beta, call.swiglu_limit)
    local = int(p.slots.ends[-1])
    assert 0 < local < slots
    expert, order = p.slots.expert[:local].long(), p.slots.order[:local].long()
    sums = torch.stack([raw.w13[e].float() @ p.x[t].float() for e, t in zip(expert, order // case.top_k, strict=True)])
    wide = factor.repeat_interleave(columns // factor.shape[1], 1)[expert]
    real = sums * wide + raw.w13_bias[expert]
    gate, up = real.chunk(2, 1) if raw.is_gated else (None, real)
    weight = call.topk_weights.flatten()[order][:, None]
    halves = activation_gradients(activation, gate, up, u[:local] * weight, *constants)
    expected = torch.cat([t for t in halves if t is not None], 1)
    expected = expected * wide if raw.is_gated else expected
    torch.testing.assert_close(z[:local], expected, rtol=1e-4, atol=2e-5)
    rounded = apply_activation(activation, gate, up, *constants).bfloat16().float()
    torch.testing.assert_close(h[:local], rounded, rtol=2.0**-7, atol=1e-6)  # may round to its neighbour
    assert torch.equal(h[:local], kept[:local])
    assert torch.equal(kept[local:], u[local:])
    assert all((t[local:] == 7).all() for t in (h, z))
    of_bias = (grad.float()[order // case.top_k] * raw.w2_bias[expert]).sum(1)
    want = torch.zeros(slots, device=DEVICE).index_copy(0, order, (rounded * u[:local]).sum(1) + of_bias)
    torch.testing.assert_close(dw, want, rtol=1e-3, atol=3e-2)


def _layouts() -> list[Any]:
    found = []
    for name in ("triton", "cuda_sm90", "cuda_sm90_int4"):
        problems = {s: Problem(s, "none", hidden_size=128, intermediate_size=96) for s in SCHEMES if s != "none"}
        fits = {s: all(r.unmet(p) is None for r in BACKENDS[name].requires if r.of_format) for s, p in problems.items()}
        plain = ["relu2_no_mul"] if name != "triton" else []
        found += [(name, scheme, act) for scheme, it_fits in fits.items() if it_fits for act in ("silu", *plain)]
    return found


@pytest.mark.parametrize(("backend", "scheme", "activation"), _layouts())
def test_decoded_weights(backend: str, scheme: str, activation: str) -> None:
    """Every layout: exact up to a factor where it says so, and else rounded once."""
    case = replace(LAYER, scheme=scheme, activation=activation, per_half=scheme == "nvfp4")
    call, sizes = make_call(case, backend)
    plain, some = replace(BACKENDS[backend], dequantize=None), slice(1, 3)
    for name in ("w13", "w2"):
        projection = projection_of(call, name, BACKENDS[backend], sizes)
        expected = decode_projection(projection._replace(backend=plain), some, torch.float32)
        out = torch.full(expected.shape, float("nan"), dtype=torch.bfloat16, device=DEVICE)
        decoder = decoder_of(projection, out, exact=True)
        assert decoder is not None
        decoder.run(some.start, 2, 0)
        real = out.float() * decoder.factor
        if projection.stored.scale_2 is not None:
            scale_2 = projection.stored.scale_2[some].reshape(2, -1, 1, 1)
            real = (real.unflatten(1, (scale_2.shape[1], -1)) * scale_2).flatten(1, 2)
        exact = scheme.startswith(("nvfp4", "mxfp"))
        torch.testing.assert_close(real, expected, rtol=3e-7 if exact else 2.0**-8, atol=0)
        rounded = decode_projection(projection, some, torch.bfloat16)
        torch.testing.assert_close(rounded.float(), expected, rtol=2.0**-8, atol=0)
        if backend == "triton" and scheme not in ("nvfp4", "int4"):
            continue
        single = decode_projection(projection, some, torch.float32)
        torch.testing.assert_close(single, expected, rtol=3e-7, atol=0)


@pytest.mark.parametrize(("backend", "scheme", "activation"), _layouts())
def test_decoded_columns(backend: str, scheme: str, activation: str) -> None:
    case = replace(LAYER, scheme=scheme, activation=activation, hidden=384)
    call, sizes = make_call(case, backend)
    projection, some = projection_of(call, "w13", BACKENDS[backend], sizes), slice(1, 3)
    whole = torch.empty((2, *projection.shape), dtype=torch.bfloat16, device=DEVICE)
    decoder = decoder_of(projection, whole, exact=True)
    assert decoder is not None
    decoder.run(some.start, 2, 0)
    for columns in (slice(0, 256), slice(256, 384)):
        expected = whole[:, :, columns].contiguous()
        found = torch.full_like(expected, float("nan"))
        part = decoder_of(projection, found, exact=True)
        assert part is not None
        assert part.factor == decoder.factor
        part.run(some.start, 2, columns.start)
        assert torch.equal(found, expected)


@pytest.mark.parametrize(("dtype", "zero", "group"), INT4_SCALES, ids=str)
def test_decoded_int4_with_zero_points_or_other_scales(dtype: torch.dtype, zero: bool, group: int) -> None:
    """In the forms that scales have in the layout of `cuda_sm90_int4` then."""
    case, name = replace(LAYER, scheme="int4", inter=64), "cuda_sm90_int4"
    raw = with_int4_scales(make_raw(case), dtype, zero, group)
    backend = BACKENDS[name]
    call, sizes = make_call(case, name, **backend.prepare(raw))
    for weight, expected in zip(("w13", "w2"), moe.dequantize_experts(raw), strict=True):
        projection = projection_of(call, weight, backend, sizes)
        found = decode_projection(projection, slice(0, case.experts), torch.float32)
        torch.testing.assert_close(found.cpu(), expected, rtol=3e-7, atol=0)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("gathers", [False, True])
def test_products(transposed: bool, gathers: bool) -> None:
    """Sizes that are no tiles, experts without rows, and rows that belong to nobody or to other experts."""
    g = torch.Generator().manual_seed(0)
    k, n, counts, first = 72, 136, (3, 0, 70, 0, 129, 5), 1
    ends = torch.tensor(counts).cumsum(0).int()
    rows = int(ends[-1]) + 4
    x = torch.randn(rows, k, generator=g).bfloat16().to(DEVICE)
    weights = torch.randn(4, n, k, generator=g).bfloat16().to(DEVICE)
    index = torch.randperm(rows, generator=g).int().to(DEVICE) if gathers else None
    out = torch.full((rows, n), 7.0, dtype=torch.bfloat16, device=DEVICE)
    given = weights if transposed else weights.transpose(1, 2).contiguous()
    grouped.grouped_product(x, index, given, ends.to(DEVICE), first, transposed, out)
    source = x if index is None else x[index.long()]
    expected = torch.full((rows, n), 7.0, device=DEVICE)
    for e in range(4):
        own = slice(int(ends[first + e - 1]), int(ends[first + e]))
        expected[own] = source[own].float() @ weights[e].float().T
    torch.testing.assert_close(out.float(), expected, rtol=2.0**-8, atol=1e-5)


CASES = (
    (replace(LAYER, foreign=True), "cuda_sm90", Wanted(True, True, False, False)),
    (replace(LAYER, per_half=True, bias=True, dtype=torch.float16), "triton", Wanted(True, True, True, True)),
    (replace(LAYER, scheme="none", activation="relu2_no_mul"), "triton", Wanted(True, False, False, True)),
    (replace(LAYER, scheme="mxfp4", inter=64, bias=True), "cuda_sm90", Wanted(False, False, True, False)),
    (replace(LAYER, scheme="int4", inter=64, bias=True), "cuda_sm90_int4", Wanted(False, True, True, False)),
)


@pytest.mark.parametrize(("case", "backend", "wanted"), CASES, ids=str)
def test_whole_pass(case: Case, backend: str, wanted: Wanted, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = make_raw(case)
    monkeypatch.setattr(chunks, "at_once_on_gpu", lambda *of: 2)
    check(case, backend, wanted, monkeypatch, w13_bias=raw.w13_bias, w2_bias=raw.w2_bias)


@pytest.mark.parametrize(("windows", "backend"), [(2, "cuda_sm90"), (3, "triton")])
def test_columns_of_hidden_states_in_windows(windows: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are what they are without."""
    case, wanted = replace(LAYER, hidden=640, foreign=True), Wanted(True, True, False, False)
    call, sizes = make_call(case, backend)
    grad = torch.randn(call.hidden_states.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE, case.dtype)
    monkeypatch.setattr(experts, "triton_serves", lambda rows: True)
    whole, _, *_ = experts.experts_gradients(call, BACKENDS[backend], sizes, grad, wanted)
    monkeypatch.setattr(chunks, "SHARE_OF_WEIGHTS", 1 << 20)
    monkeypatch.setattr(chunks, "WINDOWS", windows)
    made: list[Any] = []
    real = on_gpu.windows_of_hidden
    monkeypatch.setattr(on_gpu, "windows_of_hidden", lambda *of: made.extend(found := real(*of)) or found)
    found, *_ = experts.experts_gradients(call, BACKENDS[backend], sizes, grad, wanted)
    assert len(made) == windows
    assert torch.equal(found, whole)
    check(case, backend, wanted, monkeypatch)


def test_weight_on_input(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(LAYER, top_k=1, scheme="none")
    check(case, "triton", Wanted(True, True, False, False), monkeypatch, router_weight_on_input=True)


def test_no_experts_here(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(LAYER, tokens=4, scheme="none")
    ids = torch.full((4, 2), 99, dtype=torch.int32)
    call, sizes = make_call(case, "triton", topk_ids=ids)
    monkeypatch.setattr(experts, "triton_serves", lambda rows: True)
    grad = torch.ones_like(call.hidden_states)
    found = experts.experts_gradients(call, BACKENDS["triton"], sizes, grad, Wanted(True, True, False, False))
    assert all(t is not None and not t.any() for t in found[:2])


@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_linear(transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of nobody are zero."""
    call, sizes = make_call(replace(LAYER, experts=4), "triton")
    projection = projection_of(call, "w13", BACKENDS["triton"], sizes)
    stored = projection.stored
    g = torch.Generator().manual_seed(0)
    x = torch.randn(21, stored.weight.shape[1] if transposed else LAYER.hidden, generator=g).to(DEVICE, torch.bfloat16)
    ends = torch.tensor([5, 5, 12, 19], device=DEVICE)
    found = []
    for on_it in (False, True):
        monkeypatch.setattr(linear, "triton_serves", lambda rows, on_it=on_it: on_it)
        monkeypatch.setattr(linear, "product_dtype", lambda rows: torch.float32)
        monkeypatch.setattr(linear, "at_once_on_gpu", lambda *of: 3)
        backend = BACKENDS["triton"] if on_it else replace(BACKENDS["triton"], dequantize=None)
        own = (projection._replace(backend=backend), transposed)
        found.append(linear.linear_rows(x, ends, ends.tolist(), *own))
    assert found[1].dtype == x.dtype
    assert relative_l2(found[1], found[0]) <= BOUND
    assert not found[1][19:].any()


@pytest.mark.parametrize("transposed", [False, True])
def test_product_of_a_piece(transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch has no kernel for a piece of rows, and where nothing may wait for the device."""
    g = torch.Generator().manual_seed(0)
    rows, weights = torch.randn(20, 48, generator=g), torch.randn(3, 40, 48, generator=g)
    weights = weights if transposed else weights.transpose(1, 2).contiguous()
    ends = torch.tensor([4, 4, 17], dtype=torch.int32)
    expert = torch.searchsorted(ends, torch.arange(20), right=True)
    piece = Piece(torch.arange(20), expert, ends, None, torch.arange(20) < 17)
    given = rows.to(DEVICE, torch.bfloat16), weights.to(DEVICE, torch.bfloat16)
    monkeypatch.setattr(products, "triton_serves", lambda rows: True)
    monkeypatch.setattr(products, "torch_serves", lambda *of: False)
    found = products.grouped_product(*given, piece._replace(ends=ends.to(DEVICE)), transposed)
    monkeypatch.setattr(products, "triton_serves", lambda rows: False)
    expected = products.grouped_product(given[0].float().cpu(), given[1].float().cpu(), piece, transposed)
    assert relative_l2(found[:17].cpu(), expected[:17]) <= 2.0**-8
