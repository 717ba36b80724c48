"""int4 in groups of K: codes 0..15, value = fl((code - zero_point) * scale), zero point 8 where there is none.

With zero point 8 the codes are known as uint4b8; signed int4 is the same nibble with its highest bit flipped.
Every scale multiplies. Files of GPTQ and AWQ are unpacked by `int4_files`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_moe_ops.numerics._arithmetic import divide, require_dtype, require_floats
from torch_moe_ops.numerics._asymmetric import epsilon_for_zero, quantize_asymmetric
from torch_moe_ops.numerics._blocks import require_shape, split_blocks
from torch_moe_ops.numerics._nibbles import pack, unpack

__all__ = [
    "SYMMETRIC_ZERO",
    "Int4Weight",
    "dequantize",
    "dequantize_signed",
    "flip_sign_bit",
    "pack",
    "pack_int32",
    "quantize_weight_group",
    "unpack",
    "unpack_int32",
]

SYMMETRIC_ZERO = 8


class Int4Weight(NamedTuple):
    """A weight [..., N, K]: codes uint8 (0..15) of that shape, scale [..., N, groups], zero_point uint8 like scale."""

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None  # None: 8 everywhere


def pack_int32(codes: Tensor) -> Tensor:
    """uint8 codes [..., K] (0..15), K % 8 == 0 -> int32 [..., K / 8]; nibble i of word j = element 8j + i."""
    require_dtype("int4.pack_int32", "codes", codes, torch.uint8)
    nibbles = split_blocks("int4.pack_int32", "codes", codes, 8).to(torch.int32)
    return (nibbles << _shifts(codes)).sum(-1, dtype=torch.int32)


def unpack_int32(packed: Tensor) -> Tensor:
    """Inverse of pack_int32: int32 [..., K / 8] -> uint8 codes [..., K]."""
    require_dtype("int4.unpack_int32", "packed", packed, torch.int32)
    return ((packed[..., None] >> _shifts(packed)) & 15).to(torch.uint8).flatten(-2)


def _shifts(like: Tensor) -> Tensor:
    return torch.arange(0, 32, 4, device=like.device, dtype=torch.int32)


def flip_sign_bit(packed: Tensor) -> Tensor:
    """uint4b8 nibbles <-> signed int4 nibbles (two's complement): flip the highest bit of each; its own inverse.

    Args:
        packed: uint8 (XOR 0x88) or int32 (XOR 0x88888888), any shape. Not written to.
    """
    require_dtype("int4.flip_sign_bit", "packed", packed, torch.uint8, torch.int32)
    return packed ^ (0x88 if packed.dtype == torch.uint8 else 0x88888888 - (1 << 32))


@torch.no_grad()
def quantize_weight_group(
    w: Tensor, group: int = 32, symmetric: bool = True, scale_dtype: torch.dtype = torch.bfloat16
) -> Int4Weight:
    """Quantize weights in the form of compressed-tensors, bit-equal with it where scale_dtype is the dtype of w.

    symmetric:  scale = amax / 7.5;           code = clamp(round(w / scale), -8, 7) + 8
    otherwise:  scale = (max - min) / 15 with max >= 0 >= min;  zero = clamp(round(-8 - min / scale), -8, 7) + 8;
                code = clamp(round(w / scale + (zero - 8)), -8, 7) + 8
    Each operation is rounded to scale_dtype; round() takes ties to even; in a zero group
    scale is scale_dtype's epsilon and zero 8.

    Args:
        w: [..., K] bfloat16, float16 or float32.
        group: values of K that share a scale, a divisor of K; -1: all of K.
    """
    function = "int4.quantize_weight_group"
    require_floats(function, "w", w)
    if group < 1 and group != -1:
        raise ValueError(f"{function}: group must be positive or -1, got {group}")
    size = group if group > 0 else max(w.shape[-1:], default=1)
    groups = split_blocks(function, "w", w, max(size, 1)).float()
    if symmetric:
        scale = epsilon_for_zero(divide(groups.abs().amax(-1), 7.5).to(scale_dtype))
        quotient = divide(groups, scale.float()[..., None]).to(scale_dtype).float()
        return Int4Weight(_codes(quotient).flatten(-2), scale, None)
    signed, scale, zero = quantize_asymmetric(groups, 4, scale_dtype)
    return Int4Weight((signed + 8).to(torch.uint8).flatten(-2), scale, (zero + 8).to(torch.uint8))


def _codes(quotient: Tensor) -> Tensor:
    return (quotient.round().clamp_(-8, 7) + 8).to(torch.uint8)


def dequantize(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    g_idx: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """fl((codes - zero_point) * scale).

    Args:
        codes: uint8 [..., N, K], one code (0..15) a byte.
        scale: float dtype [..., N, groups], multiplies; the group size is K / groups.
        zero_point: integer dtype, shaped like scale; None: 8.
        g_idx: integer [K] or [..., K]: the group of each column, where groups are not contiguous (GPTQ's desc_act).
        dtype: float32 or float64.
    Returns: [..., N, K] of dtype.
    """
    function = "int4.dequantize"
    require_dtype(function, "codes", codes, torch.uint8)
    if zero_point is not None:
        require_shape(function, "zero_point", zero_point, tuple(scale.shape))
    if g_idx is not None:
        columns = None if zero_point is None else _per_column(function, zero_point, codes, g_idx)
        zero = SYMMETRIC_ZERO if columns is None else columns.to(dtype)
        return (codes.to(dtype) - zero) * _per_column(function, scale, codes, g_idx).to(dtype)
    groups = max(scale.shape[-1], 1) if scale.ndim else 1
    if codes.ndim == 0 or codes.shape[-1] % groups:
        text = f"a multiple of its {groups} scales, got shape {tuple(codes.shape)}"
        raise ValueError(f"{function}: K of codes must be {text}")
    blocks = split_blocks(function, "codes", codes, max(codes.shape[-1] // groups, 1)).to(dtype)
    require_shape(function, "scale", scale, blocks.shape[:-1])
    zero = SYMMETRIC_ZERO if zero_point is None else zero_point.to(dtype)[..., None]
    return ((blocks - zero) * scale.to(dtype)[..., None]).flatten(-2)


def _per_column(function: str, per_group: Tensor, codes: Tensor, g_idx: Tensor) -> Tensor:
    """[..., N, groups] -> [..., N, K] by the group of each column."""
    require_shape(function, "scale", per_group[..., 0], codes.shape[:-1])
    if g_idx.shape not in (codes.shape[-1:], codes.shape[:-2] + codes.shape[-1:]):
        text = f"have one entry per column of codes {tuple(codes.shape)}, got shape {tuple(g_idx.shape)}"
        raise ValueError(f"{function}: g_idx must {text}")
    return torch.gather(per_group, -1, g_idx.long().unsqueeze(-2).expand(codes.shape))


def dequantize_signed(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """MXINT4: packed uint8 [..., K / 2] of signed nibbles (low = even k) times scale [..., K / group]."""
    return dequantize(unpack(flip_sign_bit(packed)), scale, dtype=dtype)
