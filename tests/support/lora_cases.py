"""Layers of every scheme and layout of scales, and adapters for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from problems import Case, make_raw
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.core.schemes import SCHEMES, ZERO_POINT_DTYPES
from torch_moe_ops.numerics import int4, int8

CASE = Case(experts=3, hidden=256, inter=128, bias=True, dtype=torch.float32)
ACT_FORMATS = {"fp8": "fp8", "int8": "int8", "nvfp4": "nvfp4"}


def plain(scheme: str) -> moe.RawWeights:
    """As quantize_experts makes it, with biases and, where the scheme has them, calibrated input scales."""
    act = ACT_FORMATS.get(scheme, "none")
    case = dataclasses.replace(CASE, scheme=scheme, act_format=act, input_scale="none" if act == "none" else "expert")
    return dataclasses.replace(make_raw(case), swiglu_limit=7.0, source="somewhere")


def tied_halves() -> moe.RawWeights:
    """NVFP4 with one scale_2 for gate and one for up, and the same number in both."""
    raw = plain("nvfp4")
    assert raw.w13_scale_2 is not None
    return dataclasses.replace(raw, w13_scale_2=raw.w13_scale_2.repeat(1, 2))


def split_halves() -> moe.RawWeights:
    return make_raw(dataclasses.replace(CASE, per_half=True))


def one_scale_2() -> moe.RawWeights:
    """NVFP4 with one scale_2 a projection for all experts, as ModelOpt's fused files have it."""
    raw = plain("nvfp4")
    assert raw.w13_scale_2 is not None and raw.w2_scale_2 is not None
    shared = {"w13_scale_2": raw.w13_scale_2, "w2_scale_2": raw.w2_scale_2}
    return dataclasses.replace(raw, **{name: t.amax().expand(t.shape).clone() for name, t in shared.items()})


def fp8_matrices(halves: int) -> Callable[[], moe.RawWeights]:
    def make() -> moe.RawWeights:
        raw = plain("fp8")
        assert raw.w13_scale is not None and raw.w2_scale is not None
        scales = {"w13_scale": raw.w13_scale[:, :: CASE.inter, 0][:, :halves], "w2_scale": raw.w2_scale[:, :1, 0]}
        return dataclasses.replace(raw, **{name: t.contiguous() for name, t in scales.items()})

    return make


def grouped(scheme: str, group: int, dtype: torch.dtype, zero_points: bool) -> Callable[[], moe.RawWeights]:
    """int4 or int8 in groups of K (-1: a row), from weights that lie around 0.3 of their spread."""

    def make() -> moe.RawWeights:
        g = torch.Generator().manual_seed(3)
        tensors: dict[str, Tensor] = {}
        for name, rows, k in (("w13", 2 * CASE.inter, CASE.hidden), ("w2", CASE.hidden, CASE.inter)):
            w = (torch.randn(CASE.experts, rows, k, generator=g) + 0.3) / k**0.5
            size = k if group == -1 else group
            zero: Tensor | None = None
            if scheme == "int4":
                codes, scale, zero = int4.quantize_weight_group(w, size, not zero_points, dtype)
                codes = int4.pack_int32(codes)
            elif zero_points:
                codes, scale, zero = int8.quantize_weight_asymmetric(w, size, dtype)
                assert zero.dtype == ZERO_POINT_DTYPES[scheme]
            else:
                codes, scale = int8.quantize_weight_group(w, size, dtype)
            tensors |= {name: codes, f"{name}_scale": scale} | ({} if zero is None else {f"{name}_zero_point": zero})
        return moe.RawWeights(scheme, **tensors, activation="silu")  # type: ignore[arg-type]

    return make


LAYERS: dict[str, Callable[[], moe.RawWeights]] = {
    **{scheme: (lambda scheme=scheme: plain(scheme)) for scheme in SCHEMES},
    "nvfp4 tied halves": tied_halves,
    "nvfp4 split halves": split_halves,
    "nvfp4 one scale_2": one_scale_2,
    "fp8 per tensor": fp8_matrices(1),
    "fp8 per half": fp8_matrices(2),
    "int4 rows": grouped("int4", -1, torch.float16, False),
    "int4 groups of 32": grouped("int4", 32, torch.float32, False),
    "int4 zero points": grouped("int4", 64, torch.bfloat16, True),
    "int8 groups": grouped("int8", 32, torch.float16, False),
    "int8 zero points": grouped("int8", 128, torch.float32, True),
    "none relu2": lambda: make_raw(dataclasses.replace(CASE, scheme="none", activation="relu2_no_mul")),
    "nvfp4 relu2": lambda: make_raw(dataclasses.replace(CASE, activation="relu2_no_mul")),
}


def adapters(raw: moe.RawWeights, rank: int = 4, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Factors whose product has a fifth of the weights' size, with more on the first expert's up rows."""
    g = torch.Generator().manual_seed(11)
    factors = {}
    for name, dequantized in zip(("13", "2"), moe.dequantize_experts(raw), strict=True):
        experts, rows, k = dequantized.shape
        b = torch.randn(experts, rows, rank, generator=g) * dequantized.std() / 5
        b[0, rows // 2 :] *= 8
        factors[f"a{name}"] = (torch.randn(experts, rank, k, generator=g) / rank**0.5).to(dtype)
        factors[f"b{name}"] = b.to(dtype)
    return factors


def cancelling(raw: moe.RawWeights) -> dict[str, Tensor]:
    """Factors other than zero whose product is exactly zero: v - v."""
    factors = adapters(raw, rank=1)
    for name in ("13", "2"):
        a, b = factors[f"a{name}"], factors[f"b{name}"]
        factors |= {f"a{name}": torch.cat((a, a), 1), f"b{name}": torch.cat((b, -b), 2)}
    return factors


def factors_of(raw: moe.RawWeights, adapters: int, rank: int, dtype: torch.dtype, seed: int = 11) -> moe.Lora:
    """Adapters of all experts whose addends are about as large as the experts' own products."""
    g = torch.Generator().manual_seed(seed)
    named: dict[str, Tensor] = {}
    for name, rows, k in (
        ("13", raw.w13.shape[1], raw.hidden_size),
        ("2", raw.hidden_size, raw.intermediate_size),
    ):
        named[f"a{name}"] = (torch.randn(raw.num_experts, adapters * rank, k, generator=g) / k**0.5).to(dtype)
        named[f"b{name}"] = (torch.randn(raw.num_experts, rows, adapters * rank, generator=g) / rank**0.5).to(dtype)
    scaling = 0.5 if adapters == 1 else torch.rand(adapters, generator=g) + 0.5
    return moe.Lora(**named, scaling=scaling)
