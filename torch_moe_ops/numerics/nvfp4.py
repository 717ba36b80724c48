"""NVFP4: e2m1 codes, one e4m3 scale per 16 of K, and a float32 factor per tensor, matrix or row.

Activations and weights are quantized by different rules, on purpose: an activation block that is zero
or underflows gets scale 0, a weight block at least the smallest e4m3 and 1.0 where it is zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_moe_ops.numerics import e2m1, e4m3
from torch_moe_ops.numerics._arithmetic import amax_or_nan, divide, require_dtype, require_floats
from torch_moe_ops.numerics._blocks import align_leading, per_row, require_shape, split_blocks

BLOCK = 16
RANGE = e2m1.MAX * e4m3.MAX  # 2688
MAX_GSCALE = 2.0**118  # the largest power of two for which no reciprocal in quantize_activation overflows
_ONE_SIXTH = 0xAAAAAB / 2.0**26  # fl(1 / 6), bits 0x3E2AAAAB
_LARGEST_FLOAT = torch.finfo(torch.float32).max


@torch.no_grad()
def quantize_activation(x: Tensor, gscale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize activations; bit-equal on every device.

    Per block of 16, each line one float32 rounding (c = fl(1/6)):
        s = min(fl(gscale * fl(v * c)), 448), v = max|x|;  S = e4m3(s), NaN where v is infinite or NaN
        r = 0 where S = 0, else fl(1 / fl(S * fl(1 / gscale))), at most the largest float;  code = e2m1(fl(x * r))

    Args:
        x: [..., K] bfloat16, float16 or float32, K % 16 == 0.
        gscale: float32 [] or x.shape[:-1] (one per row), finite, multiplies x: 2688 / amax. NaN: of a row with NaN.
    Returns: codes uint8 [..., K / 2] (low nibble = even k) and scale float8_e4m3fn [..., K / 16] (linear).
        `x ~ e2m1 * scale / gscale`. The scale is not NaN for finite x; NaN or an infinity in x makes its own block's
        scale NaN and all of the block's codes 7.
    """
    function = "nvfp4.quantize_activation"
    require_floats(function, "x", x)
    require_dtype(function, "gscale", gscale, torch.float32)
    blocks = split_blocks(function, "x", x, BLOCK)
    gs = per_row(function, gscale, x)
    scale = e4m3.encode(torch.clamp_max(gs * (amax_or_nan(blocks, -1) * _ONE_SIXTH), e4m3.MAX))
    stored = e4m3.decode(scale)
    # 1 / 0 would be infinite, and infinity times zero NaN: a block whose scale underflows is lost, by contract.
    factor = (stored * gs.reciprocal()).reciprocal_().clamp_max_(_LARGEST_FLOAT).masked_fill_(stored == 0, 0.0)
    codes = e2m1.encode(blocks.float() * factor[..., None])
    return e2m1.pack(codes.flatten(-2)), scale


@torch.no_grad()
def dynamic_gscale(x: Tensor) -> Tensor:
    """min(fl(2688 / max|x[row]|), 2^118) of each row: the gscale of a token that none was calibrated for.

    Args:
        x: [..., K] bfloat16, float16 or float32, K > 0.
    Returns: float32 x.shape[:-1], multiplies x. 1 for a row of zeros, NaN for a row with NaN or an infinity. The bound
        is met where max|x| is below 8.1e-33.
    """
    require_floats("nvfp4.dynamic_gscale", "x", x)
    amax = amax_or_nan(split_blocks("nvfp4.dynamic_gscale", "x", x, 1), (-2, -1))
    return divide(RANGE, amax).clamp_max_(MAX_GSCALE).masked_fill_(amax == 0, 1.0)


@torch.no_grad()
def quantize_weight(w: Tensor, scale_2: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize weights in ModelOpt's form; block scales and codes are bit-equal with that tool.

    scale_2 = fl(max|W| / 2688); S = e4m3(clamp(fl(max|block| / fl(6 * scale_2)), 2^-9, 448)), 1.0 for a zero block;
    code = e2m1(fl(W / fl(S * scale_2))). One difference: -0.0 gives code 8 (the sign rule of `e2m1.encode`) where
    ModelOpt writes 0; the values are equal.

    Args:
        w: [..., N, K] bfloat16, float16 or float32, K % 16 == 0.
        scale_2: float32, broadcastable to w.shape[:-2]; computed per matrix if absent (1.0 for a zero matrix).
    Returns: codes uint8 [..., N, K / 2], scale float8_e4m3fn [..., N, K / 16], scale_2 float32 w.shape[:-2].
        All scales multiply: `dequantize(codes, scale, scale_2)`.
    """
    function = "nvfp4.quantize_weight"
    require_floats(function, "w", w)
    if w.ndim < 2:
        raise ValueError(f"{function}: w must have shape [..., N, K], got {tuple(w.shape)}")
    blocks = split_blocks(function, "w", w, BLOCK).float()
    amax = blocks.abs().amax(-1)
    scale_2 = _scale_2(function, amax, scale_2)
    per_matrix = scale_2[..., None, None]
    wanted = divide(amax, per_matrix * e2m1.MAX).clamp_(e4m3.SMALLEST, e4m3.MAX)
    scale = e4m3.encode(wanted.masked_fill_(amax == 0, 1.0))
    divisor = (e4m3.decode(scale) * per_matrix)[..., None]
    # A product that underflows stands for values that are all zero.
    codes = e2m1.encode(torch.where(divisor == 0, blocks * 0, divide(blocks, divisor)))
    return e2m1.pack(codes.flatten(-2)), scale, scale_2


def _scale_2(function: str, amax: Tensor, given: Tensor | None) -> Tensor:
    """One float32 factor per matrix, from the block maxima [..., N, K / 16] or as given."""
    shape = amax.shape[:-2]
    if given is None:
        largest = amax.amax((-2, -1)) if amax.shape[-2] else amax.new_zeros(shape)
        return divide(largest, RANGE).masked_fill_(largest == 0, 1.0)
    require_dtype(function, "scale_2", given, torch.float32)
    try:
        return given.broadcast_to(shape).clone()
    except RuntimeError:
        text = f"be broadcastable to {tuple(shape)}, got shape {tuple(given.shape)}"
        raise ValueError(f"{function}: scale_2 must {text}") from None


def dequantize(codes: Tensor, scale: Tensor, alpha: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """fl(e2m1 * fl(scale * alpha)): the order of ModelOpt, bit for bit.

    Args:
        codes: uint8 [..., K / 2], low nibble = even k.
        scale: float8_e4m3fn [..., K / 16], linear.
        alpha: multiplies (a weight's scale_2, an activation's 1 / gscale); its dimensions line up with the
            first ones of codes: [] or [E] for [E, N, K / 2], [M] for rows [M, K / 2]. None: 1, and the result is exact.
        dtype: float32, or float64 to compute without these roundings.
    Returns: [..., K] of dtype.
    """
    function = "nvfp4.dequantize"
    require_dtype(function, "codes", codes, torch.uint8)
    require_dtype(function, "scale", scale, torch.float8_e4m3fn)
    blocks = split_blocks(function, "codes", codes, BLOCK // 2)
    require_shape(function, "scale", scale, blocks.shape[:-1])
    factor = e4m3.decode(scale).to(dtype)
    if alpha is not None:
        factor = factor * align_leading(function, "alpha", alpha, codes.ndim).to(dtype)
    return (e2m1.decode_packed(blocks).to(dtype) * factor[..., None]).flatten(-2)
