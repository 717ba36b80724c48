"""merge_lora: what is merged is the sum, within half a step of the format, in the layout that the layer had."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from lora_cases import LAYERS, adapters, cancelling, plain
from problems import Case, make_batch
from tolerances import layer_bound, relative_l2
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torch_moe_ops as moe
from torch_moe_ops.core.same_bits import same_bits
from torch_moe_ops.core.schemes import SCHEMES

SCALING = 0.5
# Quantizing what was dequantized gives the same values: not where the scale is amax / 7.5 or amax / 127.5, of which no
# code is the maximum, nor with zero points, nor where scale_2 of NVFP4 is not that of the largest weight.
IDEMPOTENT = [
    *("nvfp4", "nvfp4 tied halves", "nvfp4 one scale_2", "nvfp4 relu2", "mxfp4", "mxfp8", "mxfp6_e3m2", "mxfp6_e2m3"),
    *("fp8", "fp8 per tensor", "fp8 per half", "fp8_block", "none", "none relu2"),
]
# (mantissa bits, exponent of the smallest normal) of what a value is rounded to.
FLOATS = {
    "nvfp4": (1, 0),
    "mxfp4": (1, 0),
    "mxfp6_e3m2": (2, -2),
    "mxfp6_e2m3": (3, 0),
    "mxfp8": (3, -6),
    "fp8": (3, -6),
    "fp8_block": (3, -6),
}


def exact_sums(raw: moe.RawWeights, factors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The formula, in float64."""
    w13, w2 = moe.dequantize_experts(raw)
    return {
        name: w.double() + SCALING * torch.einsum("eor,eri->eoi", b.double(), a.double())
        for name, w, a, b in (("w13", w13, factors["a13"], factors["b13"]), ("w2", w2, factors["a2"], factors["b2"]))
    }


def scale_of_values(raw: moe.RawWeights, name: str) -> Tensor:
    """float64 [E, rows, K]: what multiplies the code of each value."""
    experts, rows, storage = getattr(raw, name).shape
    k = SCHEMES[raw.scheme].logical_k(storage)
    scale = getattr(raw, f"{name}_scale")
    if SCHEMES[raw.scheme].element:
        return torch.exp2(scale.double() - 127).repeat_interleave(32, 2)
    scale = scale.double()
    if scale.ndim == 2:
        return scale.repeat_interleave(rows // scale.shape[1], 1)[..., None].expand(experts, rows, k)
    if raw.scheme == "fp8_block":
        return scale.repeat_interleave(128, 1)[:, :rows].repeat_interleave(128, 2)[..., :k]
    scale = scale.repeat_interleave(k // scale.shape[2], 2)
    scale_2 = getattr(raw, f"{name}_scale_2")
    if scale_2 is None:
        return scale
    halves = scale_2.double().reshape(experts, -1)
    return scale * halves.repeat_interleave(rows // halves.shape[1], 1)[..., None]


def half_steps(raw: moe.RawWeights, name: str, exact: Tensor) -> Tensor:
    """How far a value may be from the code that stands for it, [E, rows, K]."""
    if raw.scheme == "none":
        bits = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}[raw.w13.dtype]
        return exact.abs() * 2.0 ** -(bits + 1)
    scale = scale_of_values(raw, name)
    if raw.scheme in FLOATS:
        bits, smallest = FLOATS[raw.scheme]
        exponent = torch.frexp((exact / scale).abs()).exponent - 1
        return scale * torch.exp2(exponent.clamp_min(smallest).double() - bits - 1) * (1 + 1e-5)
    # Integers: besides half a step, quotients are rounded to the dtype of the scales, and the largest value is
    # half a step beyond the last code before that.
    eps = torch.finfo(getattr(raw, f"{name}_scale").dtype).eps
    largest = 15.0 if raw.scheme != "int8" else 255.0
    return scale * (0.5 + largest * eps)


@pytest.mark.parametrize("layer", LAYERS)
def test_the_merged_layer_is_the_sum(layer: str) -> None:
    raw = LAYERS[layer]()
    factors = adapters(raw)
    merged = moe.merge_lora(raw, **factors, scaling=SCALING)
    for (name, exact), got, before in zip(
        exact_sums(raw, factors).items(), moe.dequantize_experts(merged), moe.dequantize_experts(raw), strict=True
    ):
        error, allowed = (got - exact).abs(), half_steps(merged, name, exact)
        assert (error <= allowed).all(), (error / allowed).max()
        assert relative_l2(got, exact) < 0.6 * relative_l2(before, exact)  # not what it was


@pytest.mark.parametrize("layer", LAYERS)
def test_everything_else_stays(layer: str) -> None:
    raw = LAYERS[layer]()
    before = {name: t.clone() for name, t in raw.tensors().items()}
    merged = moe.merge_lora(raw, **adapters(raw), scaling=SCALING)
    made = {f"{name}{part}" for name in ("w13", "w2") for part in ("", "_scale", "_scale_2", "_zero_point")}
    assert merged.tensors().keys() == before.keys()
    for name, tensor in merged.tensors().items():
        assert same_bits(getattr(raw, name), before[name])  # raw is not written to
        assert (tensor.shape, tensor.dtype) == (before[name].shape, before[name].dtype), name
        assert name in made or same_bits(tensor, before[name]), name
    for field in dataclasses.fields(raw):
        if field.name not in before:
            assert getattr(merged, field.name) == getattr(raw, field.name)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_quantizer_is_that_of_quantize_experts(scheme: str) -> None:
    """Small integers: no rounding lies between the two sums. int4's groups are those of the default."""
    g = torch.Generator().manual_seed(5)
    w13, w2 = (torch.randn(2, *shape, generator=g).bfloat16() for shape in ((256, 128), (128, 128)))
    raw = moe.quantize_experts(w13, w2, scheme)
    a, b = (torch.randint(-2, 3, shape, generator=g).float() for shape in ((2, 3, 128), (2, 256, 3)))
    merged = moe.merge_lora(raw, a, b, scaling=1.0)
    again = moe.quantize_experts(moe.dequantize_experts(raw)[0] + b @ a, moe.dequantize_experts(raw)[1], scheme)
    for name, tensor in again.tensors().items():
        if name.startswith("w13") and scheme != "none":
            assert same_bits(getattr(merged, name), tensor), name


@pytest.mark.parametrize("which", ["a", "b", "scaling"])
@pytest.mark.parametrize("layer", LAYERS)
def test_nothing_learned_changes_no_bit(layer: str, which: str) -> None:
    """B starts as zeros."""
    raw = LAYERS[layer]()
    factors = {name: t * (not name.startswith(which)) for name, t in adapters(raw).items()}
    assert moe.merge_lora(raw, **factors, scaling=0.0 if which == "scaling" else SCALING).equal(raw)


@pytest.mark.parametrize("layer", [name for name in LAYERS if name != "nvfp4 one scale_2"])
def test_an_expert_that_learned_nothing_changes_no_bit(layer: str) -> None:
    raw = LAYERS[layer]()
    factors = adapters(raw)
    factors["b13"][1], factors["a2"][1] = 0, 0
    merged = moe.merge_lora(raw, **factors, scaling=SCALING)
    for name, tensor in raw.tensors().items():
        if tensor.ndim:
            assert same_bits(getattr(merged, name)[1], tensor[1]), name
    assert not same_bits(merged.w13[2], raw.w13[2]) and not same_bits(merged.w2[2], raw.w2[2])


@pytest.mark.parametrize("layer", IDEMPOTENT)
def test_a_sum_of_zero_keeps_every_value(layer: str) -> None:
    raw = LAYERS[layer]()
    merged = moe.merge_lora(raw, **cancelling(raw), scaling=SCALING)
    for before, after in zip(moe.dequantize_experts(raw), moe.dequantize_experts(merged), strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("layer", ["nvfp4", "nvfp4 one scale_2", "fp8", "fp8 per half", "fp8_block"])
def test_a_sum_of_zero_keeps_every_value_whatever_the_scales(layer: str) -> None:
    """fl(fl(448 s) / 448) is not s for every s: scales of no particular mantissas."""
    raw = LAYERS[layer]()
    scales = [name for name, t in raw.tensors().items() if t.dtype == torch.float32 and "_scale" in name]
    changed: dict[str, Any] = {name: getattr(raw, name) * 1.2345678 for name in scales if "input" not in name}
    raw = dataclasses.replace(raw, **changed)
    merged = moe.merge_lora(raw, **cancelling(raw), scaling=SCALING)
    for before, after in zip(moe.dequantize_experts(raw), moe.dequantize_experts(merged), strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("layer", sorted(LAYERS.keys() - set(IDEMPOTENT)))
def test_elsewhere_a_sum_of_zero_moves_values_by_half_a_step(layer: str) -> None:
    raw = LAYERS[layer]()
    merged = moe.merge_lora(raw, **cancelling(raw), scaling=SCALING)
    before, after = moe.dequantize_experts(raw), moe.dequantize_experts(merged)
    if "zero points" not in layer:
        assert not all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    for name, old, new in zip(("w13", "w2"), before, after, strict=True):
        assert ((new - old).abs() <= half_steps(merged, name, old.double())).all()


def test_scales_in_common_stay_in_common() -> None:
    def merged(layer: str) -> moe.RawWeights:
        raw = LAYERS[layer]()
        return moe.merge_lora(raw, **adapters(raw), scaling=SCALING)

    tied, split, one = (merged(f"nvfp4 {which}") for which in ("tied halves", "split halves", "one scale_2"))
    assert tied.w13_scale_2 is not None and split.w13_scale_2 is not None
    assert torch.equal(tied.w13_scale_2[:, 0], tied.w13_scale_2[:, 1])
    assert (split.w13_scale_2[:, 0] != split.w13_scale_2[:, 1]).all()
    assert one.w13_scale_2 is not None and one.w2_scale_2 is not None
    assert one.w13_scale_2.unique().numel() == one.w2_scale_2.unique().numel() == 1
    # Each is that of the largest value which it serves.
    for raw, dims in ((tied, (1, 2)), (one, (0, 1, 2))):
        w13 = moe.dequantize_experts(raw)[0]
        assert raw.w13_scale_2 is not None
        torch.testing.assert_close(
            w13.abs().amax(dims) / 2688, raw.w13_scale_2[:, 0].amax(0) if 0 in dims else raw.w13_scale_2[:, 0]
        )


def test_a_scale_of_all_experts_stays_while_it_covers_the_values() -> None:
    """Else experts that learned nothing would be rounded anew, all in one direction."""
    raw = LAYERS["nvfp4 one scale_2"]()
    # An adapter that makes everything of one expert smaller, and one that makes a value larger than all others.
    w13 = moe.dequantize_experts(raw)[0]
    largest = int(w13.abs().flatten(1).amax(1).argmax())
    rank = min(w13.shape[1:])
    a, b = (torch.zeros(*shape) for shape in ((len(w13), rank, w13.shape[2]), (len(w13), w13.shape[1], rank)))
    u, s, v = torch.linalg.svd(w13[largest].float(), full_matrices=False)
    a[largest], b[largest] = v, -0.03 * u * s
    smaller = moe.merge_lora(raw, a, b, scaling=1.0)
    larger = moe.merge_lora(raw, a, b, scaling=-50.0)
    assert raw.w13_scale_2 is not None and smaller.w13_scale_2 is not None and larger.w13_scale_2 is not None
    assert torch.equal(smaller.w13_scale_2, raw.w13_scale_2) and (larger.w13_scale_2 > raw.w13_scale_2).all()
    others = [e for e in range(len(w13)) if e != largest]
    assert same_bits(smaller.w13[others], raw.w13[others])


def test_either_projection_alone_is_the_same_as_in_both() -> None:
    raw = plain("nvfp4")
    factors = adapters(raw)
    first = moe.merge_lora(raw, factors["a13"], factors["b13"], scaling=SCALING)
    assert first.w2 is raw.w2 and first.w2_scale is raw.w2_scale
    both = moe.merge_lora(first, a2=factors["a2"], b2=factors["b2"], scaling=SCALING)
    assert both.equal(moe.merge_lora(raw, **factors, scaling=SCALING))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_factors_are_what_they_are_in_16_bits(dtype: torch.dtype) -> None:
    """Parameters too, under autocast and with products of fewer bits allowed."""
    raw = plain("none")
    raw = dataclasses.replace(raw, w13=raw.w13.float(), w2=raw.w2.float())
    factors = adapters(raw, dtype=dtype)
    exact = exact_sums(raw, factors)
    allowed = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            given = {name: torch.nn.Parameter(t) for name, t in factors.items()}
            merged = moe.merge_lora(raw, **given, scaling=SCALING)
    finally:
        torch.set_float32_matmul_precision(allowed)
    assert not merged.w13.requires_grad
    for name in ("w13", "w2"):
        assert torch.equal(getattr(merged, name), exact[name].float())


@pytest.mark.parametrize("layer", LAYERS)
def test_a_merged_layer_is_served(layer: str) -> None:
    """prepare takes it, the backend cpu computes what the reference does, and an old layer takes it over in place."""
    raw = LAYERS[layer]()
    merged = moe.merge_lora(raw, **adapters(raw), scaling=SCALING)
    case = Case(experts=3, hidden=raw.hidden_size, tokens=7, dtype=torch.float32)
    x, ids, weights = make_batch(case)
    served = {
        backend: moe.fused_moe_routed(x, ids, weights, moe.prepare(merged, act_format="none", backend=backend))
        for backend in ("cpu", "reference")
    }
    bound = layer_bound("cpu", "none", torch.float32, 7 * 2 * raw.intermediate_size, raw.activation or "")
    assert relative_l2(served["cpu"], served["reference"]) < bound
    w = moe.prepare(raw, act_format="none", backend="cpu")
    assert relative_l2(moe.fused_moe_routed(x, ids, weights, w), served["reference"]) > 2 * bound
    assert torch.equal(moe.fused_moe_routed(x, ids, weights, w.update_(merged)), served["cpu"])


class LargestFloats(TorchDispatchMode):
    """The most bytes that one floating-point result has."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self.bytes = max(self.bytes, tensor.numel() * tensor.element_size())
        return result


@pytest.mark.parametrize("layer", ["nvfp4", "nvfp4 one scale_2", "int4 zero points", "fp8_block"])
def test_one_expert_at_a_time(layer: str) -> None:
    """No intermediate is larger than one expert in float64, however many there are."""
    raw = LAYERS[layer]()
    many = {name: t.repeat(8, *[1] * (t.ndim - 1)) for name, t in raw.tensors().items() if t.ndim}
    raw = dataclasses.replace(raw, **many)  # type: ignore[arg-type]
    factors = adapters(raw)
    with LargestFloats() as seen:
        moe.merge_lora(raw, **factors, scaling=SCALING)
    w13_size = raw.w13.shape[1] * raw.hidden_size
    assert raw.num_experts == 24
    codes = raw.w13.numel() if raw.w13.is_floating_point() else 0  # the result itself
    assert seen.bytes <= max(8 * w13_size, codes)
