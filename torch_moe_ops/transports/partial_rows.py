"""Partial rows in 8 bits: e4m3 codes, and a float32 scale for each 128 values of a row.

Such rows cannot be added on their way: codes and scales are exchanged, and whoever adds the rows decodes them first.
A rank's part for itself is rounded like the others, so that a result does not depend on which rank owns the token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_moe_ops.numerics import fp8

WIRE_DTYPES = (torch.float8_e4m3fn,)
GROUP = fp8.GROUP  # values that share a scale; the last group of a row may have fewer


def encode(rows: Tensor) -> tuple[Tensor, Tensor]:
    """rows [n, hidden_size] float -> codes float8_e4m3fn like rows, scale float32 [n, ceil(hidden_size / 128)].

    NaN or an infinity makes the scale of its 128 values NaN, and all of them NaN.
    """
    codes, scale = fp8.quantize_fp8_group(rows, GROUP)
    return codes.contiguous(), scale.contiguous()


def decode(codes: Tensor, scale: Tensor) -> Tensor:
    """The inverse, float32: fl(code * scale)."""
    return fp8.dequantize_group(codes, scale, GROUP)


def bytes_of_partial_row(hidden_size: int, dtype: torch.dtype) -> int:
    """Of one row on the wire, scales included."""
    scales = -(-hidden_size // GROUP) if dtype in WIRE_DTYPES else 0
    return hidden_size * dtype.itemsize + scales * torch.float32.itemsize
