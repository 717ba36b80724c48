"""GEMM operands of the oracle: decoded weights, and activations as each `act_format` rounds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.core.schemes import SCHEMES
from torch_moe_ops.numerics import e4m3, fp8, int4, int8, mx, nvfp4, w4a8


class Operand(NamedTuple):
    """One side of a GEMM as it is multiplied: real value = values * factor.

    factor: [rows, 1] float32, or None where it is 1, or contained in the alphas.
    """

    values: Tensor
    factor: Tensor | None = None


def weight_operand(call: ExpertsCall, which: int, e: int, halves: int, dtype: torch.dtype) -> Operand:
    """[N, K] of expert e. Scales along K are applied; scales of rows are the factor; alphas are neither."""
    name = "w13" if which == 1 else "w2"
    weight, scale, zero_point = (getattr(call, f"{name}{part}") for part in ("", "_scale", "_zero_point"))
    scale, zero_point = (None if t is None else t[e] for t in (scale, zero_point))
    return decode_weight(call.scheme, Weight(weight[e], scale, zero_point, halves, dtype), call.weight_policy)


class Weight(NamedTuple):
    """One expert's matrix as it is stored."""

    codes: Tensor
    scale: Tensor | None
    zero_point: Tensor | None
    halves: int
    dtype: torch.dtype

    @property
    def given_scale(self) -> Tensor:
        assert self.scale is not None  # the op's checks have seen to it
        return self.scale


def decode_weight(scheme: str, w: Weight, weight_policy: str = "exact") -> Operand:
    """What the codes stand for under a policy (of fp8 activations)."""
    if weight_policy != "exact":
        return Operand(w4a8.dequantize(w.codes, w.given_scale, w.dtype))
    return WEIGHTS[scheme](w)


def _mx_weight(element: str) -> Callable[[Weight], Operand]:
    return lambda w: Operand(mx.dequantize_mx(w.codes, w.given_scale, element, w.dtype))


def _fp8_weight(w: Weight) -> Operand:
    """Scales per row, per half of the rows or per matrix: all are factors of rows."""
    rows, scale = w.codes.shape[0], w.given_scale
    factor = scale if scale.ndim == 2 else scale.repeat_interleave(rows // scale.shape[0])[:, None]
    return Operand(w.codes.to(w.dtype), factor)


def _fp8_block_weight(w: Weight) -> Operand:
    halves = zip(w.codes.chunk(w.halves), w.given_scale.chunk(w.halves), strict=True)
    return Operand(torch.cat([fp8.dequantize_block(codes, scale, dtype=w.dtype) for codes, scale in halves]))


def _int8_weight(w: Weight) -> Operand:
    scale, zero_point = w.given_scale, w.zero_point
    if scale.shape[1] > 1:
        return Operand(int8.dequantize_group(w.codes, scale, zero_point, w.dtype))
    values = w.codes.to(w.dtype)
    return Operand(values if zero_point is None else values - zero_point.to(w.dtype), scale.float())


def _int4_weight(w: Weight) -> Operand:
    return Operand(int4.dequantize(int4.unpack_int32(w.codes), w.given_scale, w.zero_point, dtype=w.dtype))


# What the oracle decodes, by scheme.
WEIGHTS: dict[str, Callable[[Weight], Operand]] = {
    "none": lambda w: Operand(w.codes.to(w.dtype)),
    "nvfp4": lambda w: Operand(nvfp4.dequantize(w.codes, w.given_scale, dtype=w.dtype)),
    "mxfp4": _mx_weight("e2m1"),
    "mxfp8": _mx_weight("e4m3"),
    "mxfp6_e3m2": _mx_weight("e3m2"),
    "mxfp6_e2m3": _mx_weight("e2m3"),
    "mxint4": _int4_weight,
    "int4": _int4_weight,
    "fp8": _fp8_weight,
    "fp8_block": _fp8_block_weight,
    "int8": _int8_weight,
}


def activation_operand(
    call: ExpertsCall, gemm: int, e: int, x: Tensor, x_scale: Tensor | None, emulate: bool, dtype: torch.dtype
) -> Operand:
    """The rows x of expert e as operand of GEMM 1 or 2.

    x: the hidden states (any float dtype, or packed codes with x_scale), or the intermediate in `dtype`.
    """
    if call.act_format == "none":
        return Operand(x.to(dtype))
    gscale = call.a1_gscale if gemm == 1 else call.a2_gscale
    if gscale is not None and gscale.ndim:
        gscale = gscale[e]
    if x_scale is None and not emulate:
        return _unrounded(call.act_format, x.to(dtype), gscale)
    rows = x.float() if x.dtype == torch.float64 else x
    if x_scale is None:
        group = SCHEMES[call.scheme].fp8_group
        return quantized_operand(call.act_format, rows, gscale, group, dtype)
    return packed_operand(call, x, x_scale, dtype)


def _unrounded(act_format: str, x: Tensor, gscale: Tensor | None) -> Operand:
    # NVFP4's alphas hold 1 / gscale where a gscale is given: undo it, no rounding takes place.
    return Operand(x if act_format != "nvfp4" or gscale is None else x * gscale.to(x.dtype))


def quantized_operand(act_format: str, x: Tensor, gscale: Tensor | None, group: int, dtype: torch.dtype) -> Operand:
    """Quantized as the numerics contract says, and decoded again."""
    if act_format == "nvfp4":
        if gscale is not None:
            return Operand(nvfp4.dequantize(*nvfp4.quantize_activation(x, gscale), dtype=dtype))
        per_token = nvfp4.dynamic_gscale(x)
        values = nvfp4.dequantize(*nvfp4.quantize_activation(x, per_token), dtype=dtype)
        return Operand(values, per_token.reciprocal()[:, None])
    if act_format == "fp8" and group:
        return Operand(fp8.dequantize_group(*fp8.quantize_fp8_group(x, group), group, dtype))
    if act_format in ("fp8", "int8"):
        codes, scale = (fp8.quantize_fp8 if act_format == "fp8" else int8.quantize_int8)(x, gscale)
        return Operand(codes.to(dtype), scale.expand(x.shape[0])[:, None])
    element = MX_ELEMENTS[act_format]
    return _mx(*mx.quantize_mx(x, element, "rceil"), element, dtype)


MX_ELEMENTS = {"mxfp4": "e2m1", "mxfp8": "e4m3", "mxfp6_e3m2": "e3m2", "mxfp6_e2m3": "e2m3"}
# The activation formats that the oracle rounds to.
ACT_FORMATS = ("none", "nvfp4", "fp8", "int8", *MX_ELEMENTS)


def packed_operand(call: ExpertsCall, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Operand:
    """Hidden states that came quantized."""
    act_format, group = call.act_format, SCHEMES[call.scheme].fp8_group
    if act_format == "nvfp4":
        return Operand(nvfp4.dequantize(codes, scale, dtype=dtype))
    if act_format == "fp8" and group:
        return Operand(fp8.dequantize_group(codes, scale, group, dtype))
    if act_format == "fp8":
        return Operand(e4m3.decode(codes).to(dtype), scale)
    if act_format == "int8":
        return Operand(codes.to(dtype), scale)
    return _mx(codes, scale, MX_ELEMENTS[act_format], dtype)


def _mx(codes: Tensor, scale: Tensor, element: str, dtype: torch.dtype) -> Operand:
    """Without values below the smallest normal bfloat16, which matrix instructions may take as zero."""
    values = mx.dequantize_mx(codes, scale, element, dtype)
    return Operand(values.masked_fill_(values.abs() < torch.finfo(torch.bfloat16).tiny, 0.0))
