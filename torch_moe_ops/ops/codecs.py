"""Public quantize and dequantize functions: activations by the ops, values back by the codecs of `numerics/`.

Scales multiply to dequantize; a gscale multiplies before rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_moe_ops.numerics import fp8, int4, int8, mx, nvfp4


def _float32(value: Tensor | float | None, like: Tensor) -> Tensor | None:
    """A number as a float32 tensor on the device of `like`."""
    if value is None or isinstance(value, Tensor):
        return value
    return torch.tensor(value, dtype=torch.float32, device=like.device)


def quantize_nvfp4(x: Tensor, gscale: Tensor | float) -> tuple[Tensor, Tensor]:
    """NVFP4 codes and block scales of activations, by the exact algorithm of the numerics contract.

    Args:
        x: [..., K] bfloat16, float16 or float32, K a multiple of 16.
        gscale: float32, [] or one per row [...]; multiplies x (6 * 448 / amax; see dynamic_gscale_nvfp4).

    Returns: codes uint8 [..., K/2], low nibble first, and scale float8_e4m3fn [..., K/16], linear.
    The value of an element is code * scale / gscale.
    """
    return torch.ops.moeq.quantize_nvfp4(x, _float32(gscale, x))


def dequantize_nvfp4(codes: Tensor, scale: Tensor, alpha: Tensor | float | None = None) -> Tensor:
    """float32 [..., K] = code * (scale * alpha).

    Args:
        codes: uint8 [..., K/2]; scale: float8_e4m3fn [..., K/16], as quantize_nvfp4 returns them.
        alpha: multiplies: weight_scale_2, or 1 / gscale. [], or lining up with the first dimensions. None: 1.
    """
    return nvfp4.dequantize(codes, scale, _float32(alpha, codes))


def dynamic_gscale_nvfp4(x: Tensor) -> Tensor:
    """One gscale per row: 2688 / amax, at most 2^118; 1 for a zero row, NaN where x is not finite. -> float32 [...]."""
    return torch.ops.moeq.dynamic_gscale_nvfp4(x)


def quantize_mxfp4(x: Tensor, rule: str = "rceil") -> tuple[Tensor, Tensor]:
    """x [..., K], K a multiple of 32 -> codes uint8 [..., K/2] and e8m0 scales uint8 [..., K/32].

    rule of the block exponent: "rceil" (never clips), "floor" (OCP), "even".
    """
    return torch.ops.moeq.quantize_mxfp4(x, rule)


def dequantize_mxfp4(codes: Tensor, scale: Tensor) -> Tensor:
    """float32 [..., K] = code * 2^(scale - 127)."""
    return mx.dequantize_mx(codes, scale, "e2m1")


def quantize_mxfp8(x: Tensor, rule: str = "rceil") -> tuple[Tensor, Tensor]:
    """x [..., K], K a multiple of 32 -> codes float8_e4m3fn [..., K] and e8m0 scales uint8 [..., K/32]."""
    return torch.ops.moeq.quantize_mxfp8(x, rule)


def dequantize_mxfp8(codes: Tensor, scale: Tensor) -> Tensor:
    """float32 [..., K] = code * 2^(scale - 127)."""
    return mx.dequantize_mx(codes, scale, "e4m3")


def quantize_fp8(x: Tensor, gscale: Tensor | float | None = None, group: int = 0) -> tuple[Tensor, Tensor]:
    """x [..., K] -> codes float8_e4m3fn [..., K] and scales float32 [..., 1], or [..., ceil(K / group)].

    gscale: None: one scale per row (or per group of K), amax / 448; else [] or one per row, multiplies x.
    """
    return torch.ops.moeq.quantize_fp8(x, _float32(gscale, x), group)


def dequantize_fp8(codes: Tensor, scale: Tensor | float, group: int = 0) -> Tensor:
    """float32 [..., K] = code * scale.

    scale: [], [...] or [..., 1] (one per row, or per matrix), or with `group` [..., ceil(K / group)].
    """
    scale = _tensor(scale, codes)
    return fp8.dequantize_group(codes, scale, group) if group else fp8.dequantize(codes, scale)


def quantize_int8(x: Tensor, gscale: Tensor | float | None = None) -> tuple[Tensor, Tensor]:
    """x [..., K] -> codes int8 [..., K] and scales float32 [..., 1]; gscale as in quantize_fp8 (amax / 127)."""
    return torch.ops.moeq.quantize_int8(x, _float32(gscale, x))


def dequantize_int8(codes: Tensor, scale: Tensor | float, zero_point: Tensor | None = None) -> Tensor:
    """float32 [..., K] = (code - zero_point) * scale; scale [], [...], [..., 1] or [..., groups]."""
    scale = _tensor(scale, codes)
    if scale.ndim == codes.ndim and scale.shape[-1] > 1:
        return int8.dequantize_group(codes, scale, zero_point)
    return int8.dequantize(codes, scale, zero_point)


def quantize_int4(w: Tensor, group: int = 32) -> tuple[Tensor, Tensor]:
    """Weights [..., K] -> codes int32 [..., K/8] (value + 8, low nibble first), scales bfloat16 [..., K / group].

    The symmetric form of compressed-tensors: scale = amax / 7.5, rounded to bfloat16. group -1: the whole row.
    """
    codes, scale, _ = int4.quantize_weight_group(w, group)
    return int4.pack_int32(codes), scale


def dequantize_int4(codes: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    """float32 [..., K] = (code - zero_point) * scale; codes int32 [..., K/8], zero_point None: 8."""
    return int4.dequantize(int4.unpack_int32(codes), scale, zero_point)


def _tensor(value: Tensor | float, like: Tensor) -> Tensor:
    tensor = _float32(value, like)
    assert tensor is not None
    return tensor


def swizzle_scale(scale: Tensor) -> Tensor:
    """[..., rows, cols] -> [..., padded rows * padded cols] in the 128x4 layout, zeros in the padding."""
    return torch.ops.moeq.swizzle_scale(scale)


def unswizzle_scale(swizzled: Tensor, rows: int, cols: int) -> Tensor:
    """Inverse of swizzle_scale."""
    return torch.ops.moeq.unswizzle_scale(swizzled, rows, cols)
