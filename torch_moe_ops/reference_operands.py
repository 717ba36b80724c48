"""GEMM operands of the oracle: decoded weights, and activations as each `act_format` rounds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torch_moe_ops.ops.call import ExpertsCall
from torch_moe_ops.quant import nvfp4


class Operand(NamedTuple):
    """Activation rows as a GEMM sees them: real value = values * factor.

    factor: [rows, 1], or None where the alphas contain it already.
    """

    values: Tensor
    factor: Tensor | None = None


def weight_operand(call: ExpertsCall, which: int, e: int, dtype: torch.dtype) -> Tensor:
    """[N, K] of expert e: codes times block scales, exact; the factor left to alphas is not applied."""
    weight, scale = (call.w13, call.w13_scale) if which == 13 else (call.w2, call.w2_scale)
    return _WEIGHTS[call.scheme](weight[e], None if scale is None else scale[e], dtype)


_WEIGHTS: dict[str, Callable[[Tensor, Tensor | None, torch.dtype], Tensor]] = {
    "none": lambda weight, scale, dtype: weight.to(dtype),
    "nvfp4": lambda weight, scale, dtype: nvfp4.dequantize(weight, scale, dtype=dtype),
}


def activation_operand(
    call: ExpertsCall, gemm: int, e: int, x: Tensor, x_scale: Tensor | None, emulate: bool, dtype: torch.dtype
) -> Operand:
    """The rows x of expert e as operand of GEMM 1 or 2.

    x: the hidden states (any float dtype, or packed codes with x_scale), or the intermediate in `dtype`.
    """
    gscale = call.a1_gscale if gemm == 1 else call.a2_gscale
    if gscale is not None and gscale.ndim:
        gscale = gscale[e]
    if call.act_format == "none":
        return Operand(x.to(dtype))
    return _ACTIVATIONS[call.act_format](x, x_scale, gscale, emulate, dtype)


def _nvfp4(x: Tensor, x_scale: Tensor | None, gscale: Tensor | None, emulate: bool, dtype: torch.dtype) -> Operand:
    if x_scale is not None:
        return Operand(nvfp4.dequantize(x, x_scale, dtype=dtype))
    if not emulate:
        # The alphas hold 1 / gscale where a gscale is given: undo it, no rounding takes place.
        return Operand(x.to(dtype) if gscale is None else x.to(dtype) * gscale.to(dtype))
    rows = x.float() if x.dtype == torch.float64 else x
    if gscale is not None:
        return Operand(nvfp4.dequantize(*nvfp4.quantize_activation(rows, gscale), dtype=dtype))
    per_token = nvfp4.dynamic_gscale(rows)
    codes, scale = nvfp4.quantize_activation(rows, per_token)
    return Operand(nvfp4.dequantize(codes, scale, dtype=dtype), per_token.reciprocal()[:, None])


_Quantizer = Callable[[Tensor, "Tensor | None", "Tensor | None", bool, torch.dtype], Operand]
_ACTIVATIONS: dict[str, _Quantizer] = {"nvfp4": _nvfp4}
