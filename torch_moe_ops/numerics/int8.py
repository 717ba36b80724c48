"""int8: activations per token, weights per channel or per group of K, optionally with zero points.

Activations divide by 127 and stay within +-127; weights divide by 127.5 and use -128 too, as compressed-tensors does.
Every scale multiplies to dequantize; 1.0 where it would be 0. int8 has no NaN: a row of activations with NaN or an
infinity has the scale NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_moe_ops.numerics._arithmetic import amax_or_nan, divide, require_dtype, require_floats
from torch_moe_ops.numerics._asymmetric import quantize_asymmetric
from torch_moe_ops.numerics._blocks import align_leading, per_row, require_shape, split_blocks

_MAX = 127.0
_WEIGHT_RANGE = 127.5


@torch.no_grad()
def quantize_int8(x: Tensor, gscale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize activations, one scale per token, or with a calibrated scale.

    scale = fl(amax / 127); code = clamp(round(fl(x / scale)), -127, 127), ties to even. With gscale: fl(x * gscale).

    Args:
        x: [..., K] bfloat16, float16 or float32, K > 0.
        gscale: None (dynamic), or float32 [] or x.shape[:-1], multiplies x.
    Returns: codes int8 [..., K], and scale float32 x.shape[:-1], multiplies; fl(1 / gscale) where one is given.
        Where x holds NaN or an infinity its row's scale is NaN; the code of a quotient or product that is NaN is 0.
    """
    function = "int8.quantize_int8"
    require_floats(function, "x", x)
    amax = amax_or_nan(split_blocks(function, "x", x, 1), (-2, -1))
    if gscale is not None:
        require_dtype(function, "gscale", gscale, torch.float32)
        scale = gscale.reciprocal() + amax * 0  # NaN where amax is
        return _round(x.float() * per_row(function, gscale, x), -_MAX), scale
    scale = _nonzero(divide(amax, _MAX))
    return _round(divide(x.float(), scale[..., None]), -_MAX), scale


@torch.no_grad()
def quantize_weight_channel(w: Tensor, scale_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Quantize weights per row.

    scale = amax / 127.5; code = clamp(round(w / scale), -128, 127); scale and quotient are rounded to scale_dtype
    (compressed-tensors computes in the dtype of the weights).

    Args:
        w: [..., N, K] bfloat16, float16 or float32.
    Returns: codes int8 [..., N, K], scale of scale_dtype [..., N], multiplies.
    """
    codes, scale = quantize_weight_group(w, w.shape[-1] if w.ndim else 0, scale_dtype)
    return codes, scale[..., 0]


@torch.no_grad()
def quantize_weight_group(
    w: Tensor, group: int = 128, scale_dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """As quantize_weight_channel with one scale per `group` of K: codes int8 [..., N, K], scale [..., N, K / group]."""
    function = "int8.quantize_weight_group"
    require_floats(function, "w", w)
    groups = split_blocks(function, "w", w, max(group, 1)).float()
    scale = _nonzero(divide(groups.abs().amax(-1), _WEIGHT_RANGE).to(scale_dtype))
    return _round(divide(groups, scale.float()[..., None]).to(scale_dtype).float(), -128.0).flatten(-2), scale


@torch.no_grad()
def quantize_weight_asymmetric(
    w: Tensor, group: int = 128, scale_dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize weights with zero points, one scale and zero point per `group` of K, as `quantize_asymmetric` says.

    Args:
        w: [..., N, K] bfloat16, float16 or float32.
        group: a divisor of K.
    Returns: codes int8 [..., N, K], scale of scale_dtype [..., N, K / group], zero_point int8 like scale;
        value = (code - zero_point) * scale.
    """
    function = "int8.quantize_weight_asymmetric"
    require_floats(function, "w", w)
    groups = split_blocks(function, "w", w, max(group, 1)).float()
    codes, scale, zero = quantize_asymmetric(groups, 8, scale_dtype)
    return codes.to(torch.int8).flatten(-2), scale, zero.to(torch.int8)


def dequantize(
    codes: Tensor, scale: Tensor, zero_point: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """fl((codes - zero_point) * scale): per tensor, channel or token.

    Args:
        codes: int8 [..., K].
        scale: float dtype, multiplies; its dimensions line up with the first ones of codes: [] or [E] (per tensor),
            [E, N] or [E, N, 1] (per channel), [M] (per token of [M, K]).
        zero_point: integer dtype, in the units of codes, shaped like scale.
        dtype: float32 or float64.
    """
    require_dtype("int8.dequantize", "codes", codes, torch.int8)
    values = codes.to(dtype)
    if zero_point is not None:
        values = values - align_leading("int8.dequantize", "zero_point", zero_point, codes.ndim).to(dtype)
    return values * align_leading("int8.dequantize", "scale", scale, codes.ndim).to(dtype)


def dequantize_group(
    codes: Tensor, scale: Tensor, zero_point: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """As dequantize, with scale (and zero_point) [..., N, groups]; the group size is K / groups."""
    function = "int8.dequantize_group"
    groups = max(scale.shape[-1], 1) if scale.ndim else 1
    if codes.ndim == 0 or codes.shape[-1] % groups:
        text = f"a multiple of its {groups} scales, got shape {tuple(codes.shape)}"
        raise ValueError(f"{function}: K of codes must be {text}")
    blocks = split_blocks(function, "codes", codes, codes.shape[-1] // groups)
    require_shape(function, "scale", scale, blocks.shape[:-1])
    if zero_point is not None:
        require_shape(function, "zero_point", zero_point, blocks.shape[:-1])
    return dequantize(blocks, scale, zero_point, dtype).flatten(-2)


def _nonzero(scale: Tensor) -> Tensor:
    return scale.masked_fill_(scale == 0, 1.0)


def _round(quotient: Tensor, smallest: float) -> Tensor:
    # What a conversion makes of NaN depends on the machine.
    return quotient.round().clamp_(smallest, _MAX).nan_to_num_(nan=0.0).to(torch.int8)
