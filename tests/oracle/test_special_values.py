"""NaN, infinities and tiny values in hidden states, intermediates and activations: the oracle, and `cpu`."""

from __future__ import annotations

from functools import cache

import activation_layers
import cpu_problems
import pytest
import special_rows
import torch
from problems import Case, make_raw
from special_rows import Batch
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.core.activations import ACTIVATIONS, apply_activation

pytest.importorskip("torch_moe_ops._C", reason="the C++ extension was not compiled")

isa = cpu_problems.isa  # the fixture

# Every activation where nothing hides what it does; one that bounds its arguments beside every format.
CASES = tuple(
    special_rows.cases(
        {"": ("silu", "swigluoai", "relu2_no_mul"), "none": ("silu", "situ"), "nvfp4": tuple(ACTIVATIONS)},
        hidden=128, inter=96, dtype=torch.float32,
    )
)  # fmt: skip
# One code of an intermediate on the other side of a tie.
ONE_CODE = 5e-2


def name(case: Case) -> str:
    return f"{case.scheme}-{case.act_format}-{case.input_scale}-{case.activation}"


@cache
def solved(case: Case) -> tuple[moe.RawWeights, Batch, Tensor]:
    """A layer, its batch and the oracle's answer, shared by all instruction sets."""
    raw = make_raw(case)
    batch = special_rows.make_batch(case.hidden, case.experts, case.top_k, case.dtype)
    return raw, batch, run(raw, case, "reference")(batch.x, batch.ids, batch.weights)


def run(raw: moe.RawWeights, case: Case, backend: str) -> special_rows.Run:
    w = moe.prepare(raw, act_format=case.act_format, backend=backend)
    return lambda x, ids, weights: moe.fused_moe_routed(x, ids, weights, w, out_dtype=torch.float32)


@pytest.mark.parametrize("case", CASES, ids=name)
def test_the_oracle_shows_what_is_not_finite(case: Case) -> None:
    raw, batch, want = solved(case)
    special_rows.check_oracle(batch, want)
    special_rows.check(run(raw, case, "reference"), batch, want, 0.0)


@pytest.mark.parametrize("case", CASES, ids=name)
def test_rows(isa: str, case: Case) -> None:
    raw, batch, want = solved(case)
    special_rows.check(run(raw, case, "cpu"), batch, want, 1e-5 if case.act_format == "none" else ONE_CODE)


@pytest.mark.parametrize(("activation", "limit"), activation_layers.WITH_LIMITS)
def test_activations_of_everything(isa: str, activation: str, limit: float | None) -> None:
    raw = activation_layers.layer(activation, limit, "none", torch.float32, 16)
    want, got = (activation_layers.outputs(raw, backend, torch.float32) for backend in ("reference", "cpu"))
    assert torch.equal(got.isfinite(), want.isfinite())
    torch.testing.assert_close(got[want.isfinite()], want[want.isfinite()], rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(("activation", "limit"), activation_layers.WITH_LIMITS)
def test_activations_show_what_is_not_finite(activation: str, limit: float | None) -> None:
    arguments = special_rows.gate_up_pairs(activation)
    gate, up = arguments.unbind(1) if arguments.shape[1] == 2 else (None, arguments[:, 0])
    for dtype in (torch.float32, torch.float64):
        out = apply_activation(activation, None if gate is None else gate.to(dtype), up.to(dtype), limit=limit)
        assert not out[~arguments.isfinite().all(1)].isfinite().any()
        moderate = (arguments.abs() <= 100).all(1)
        assert moderate.any() and out[moderate].isfinite().all()


def identity_layer(case: Case) -> moe.RawWeights:
    """GEMMs whose sums have one term, so that a result is the operand's values, rounded where two are."""
    eye = torch.eye(case.hidden).repeat(1, 1, 1)
    raw = moe.quantize_experts(eye, eye, case.scheme)
    scale = {"a13_input_scale": torch.tensor(1e-37), "a2_input_scale": torch.tensor(1e-37)}
    changes = scale if case.input_scale == "tensor" else {}
    return moe.RawWeights(**(vars(raw) | changes | {"activation": "identity_no_mul"}))


# Where fl(acc * fl(alpha * row factor)) is all that is rounded after the operand.
EXACT = (("nvfp4", "nvfp4", "none"), ("nvfp4", "nvfp4", "tensor"), ("nvfp4", "fp8", "none"), ("mxfp4", "mxfp8", "none"),
         ("mxfp4", "mxfp4", "none"), ("mxfp4", "fp8", "none"), ("mxfp4", "mxfp6_e3m2", "none"),
         ("mxfp4", "mxfp6_e2m3", "none"), ("mxfp8", "mxfp8", "none"))  # fmt: skip


@pytest.mark.parametrize(("scheme", "act_format", "scale"), EXACT)
def test_values_of_subnormal_numbers_are_the_oracles(isa: str, scheme: str, act_format: str, scale: str) -> None:
    case = Case(scheme, act_format, hidden=128, inter=128, input_scale=scale)
    raw = identity_layer(case)
    g = torch.Generator().manual_seed(5)
    x = torch.randint(-(2**31), 2**31, (300, 128), generator=g).to(torch.int32)
    x = ((x & ~0x7F800000) | (torch.randint(3, (300, 1), generator=g).int() << 23)).view(torch.float32)
    x[::3] *= torch.randint(2, (100, 128), generator=g)
    x[100:200] *= 2.0 ** torch.randint(-20, 30, (100, 128), generator=g)
    ids, weights = torch.zeros(300, 1, dtype=torch.int32), torch.ones(300, 1)
    want, got = (run(raw, case, backend)(x, ids, weights) for backend in ("reference", "cpu"))
    assert want.isfinite().all() and want.any()
    if isa.startswith("amx") and scheme == "nvfp4":  # its tiles flush sums below the smallest normal number
        assert (got - want).abs().max() <= 2 * torch.finfo(torch.float32).tiny
    else:
        assert torch.equal(got, want)


QUANTIZERS = {
    "nvfp4": lambda x: moe.quantize_nvfp4(x, 300.0),
    "nvfp4_dynamic": lambda x: moe.quantize_nvfp4(x, moe.dynamic_gscale_nvfp4(x)),
    "mxfp4": moe.quantize_mxfp4,
    "mxfp8": moe.quantize_mxfp8,
    "fp8": moe.quantize_fp8,
    "fp8_static": lambda x: moe.quantize_fp8(x, 20.0),
    "fp8_group": lambda x: moe.quantize_fp8(x, group=128),
    "int8": moe.quantize_int8,
    "int8_static": lambda x: moe.quantize_int8(x, 20.0),
}


def values(quantizer: str, x: Tensor) -> Tensor:
    """What codes and scales stand for."""
    codes, scale = QUANTIZERS[quantizer](x)
    if quantizer.startswith("nvfp4"):
        gscale = moe.dynamic_gscale_nvfp4(x) if quantizer.endswith("dynamic") else torch.tensor(300.0)
        return moe.dequantize_nvfp4(codes, scale, gscale.reciprocal())
    if quantizer.startswith("mx"):
        return getattr(moe, f"de{QUANTIZERS[quantizer].__name__}")(codes, scale)  # type: ignore[no-any-return]
    if quantizer == "fp8_group":
        return moe.dequantize_fp8(codes, scale, group=128)
    return (moe.dequantize_int8 if quantizer.startswith("int8") else moe.dequantize_fp8)(codes, scale)


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_packed_rows_show_what_is_not_finite(quantizer: str) -> None:
    """Within the elements that share a scale, or for calibrated fp8 the element alone; nothing else changes."""
    batch = special_rows.make_batch(256, 4, 2, torch.float32)
    got, clean = values(quantizer, batch.x), values(quantizer, batch.x.nan_to_num(0.0, 0.0, 0.0))
    size = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32, "fp8_group": 128, "fp8_static": 1}.get(quantizer, 256)
    bad = (~batch.x.isfinite()).unflatten(1, (-1, size)).any(-1).repeat_interleave(size, dim=1)
    assert got[bad].isnan().all() and got[~bad].isfinite().all()
    assert torch.equal(got[~bad], clean[~bad])
