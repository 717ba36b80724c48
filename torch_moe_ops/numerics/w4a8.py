"""NVFP4 weights for fp8 GEMMs: each weight rounded once to e4m3 under one power of two per row.

For row n of a matrix [N, K], with w = e2m1(code) * e4m3(block scale), both exact in float32:
    x_n = the least integer with max_k |w| <= 448 * 2^x_n   (0 for a row of zeros)
    w8 = e4m3(w / 2^x_n), to nearest, ties to even, subnormals kept;     value = w8 * 2^x_n
The division is exact, so there is one rounding. 2^x_n multiplies the accumulator of row n.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_moe_ops.numerics import e4m3, nvfp4


def row_exponent(values: Tensor) -> Tensor:
    """x_n of each row: int32 [..., N] for float32 values [..., N, K]."""
    amax = values.abs().amax(-1)
    mantissa, exponent = torch.frexp(amax)  # amax = mantissa * 2^exponent, mantissa in [0.5, 1)
    # 448 = 0.875 * 2^9: up to that mantissa 2^(exponent - 9) is enough.
    least = exponent - 9 + (mantissa > 0.875).to(exponent.dtype)
    return least.masked_fill(amax == 0, 0)


def round_weights(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 weights and their row exponents.

    Args:
        codes: uint8 [..., N, K / 2]; scale: float8_e4m3fn [..., N, K / 16], as NVFP4 stores them.
    Returns: float8_e4m3fn [..., N, K], int32 [..., N].
    """
    values = nvfp4.dequantize(codes, scale)
    exponent = row_exponent(values)
    return e4m3.encode(torch.ldexp(values, -exponent[..., None])), exponent


def dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The rounded weights [..., N, K] in `dtype`, without scale_2."""
    rounded, exponent = round_weights(codes, scale)
    return torch.ldexp(e4m3.decode(rounded), exponent[..., None]).to(dtype)
