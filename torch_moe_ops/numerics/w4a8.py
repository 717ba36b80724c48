"""4-bit floating-point weights for fp8 GEMMs: each rounded once to e4m3 under one power of two per row.

For row n of a matrix [N, K], with w = e2m1(code) * block scale, exact in float32:
    x_n = the least integer with max_k |w| <= 448 * 2^x_n   (0 for a row of zeros)
    w8 = e4m3(w / 2^x_n), to nearest, ties to even, subnormals kept;     value = w8 * 2^x_n
The division is exact, so there is one rounding. 2^x_n multiplies the accumulator of row n.

NVFP4's block scales have mantissas, so that most products are rounded. MXFP4's are powers of two: 0.5 to 6 times one
has two bits, and what is rounded is only what falls below e4m3's smallest numbers: w8 is w / 2^x_n as long as that is
a multiple of 2^-9, as it is in blocks whose scale is at least 2^(x_n - 8).
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_moe_ops.numerics import e4m3, mx, nvfp4

# torch.ldexp multiplies by a float32 power of two, which must be finite.
_LARGEST_STEP = 64


def row_exponent(values: Tensor) -> Tensor:
    """x_n of each row: int32 [..., N] for float32 values [..., N, K]."""
    amax = values.abs().amax(-1)
    mantissa, exponent = torch.frexp(amax)  # amax = mantissa * 2^exponent, mantissa in [0.5, 1)
    # 448 = 0.875 * 2^9: up to that mantissa 2^(exponent - 9) is enough.
    least = exponent - 9 + (mantissa > 0.875).to(exponent.dtype)
    return least.masked_fill(amax == 0, 0)


def decode(codes: Tensor, scale: Tensor) -> Tensor:
    """The weights before they are rounded, float32 [..., N, K]; the dtype of the scales tells the formats apart.

    Args:
        codes: uint8 [..., N, K / 2].
        scale: as NVFP4 stores them, float8_e4m3fn [..., N, K / 16], or as MXFP4 does, uint8 [..., N, K / 32].
    """
    if scale.dtype == torch.uint8:
        return mx.dequantize_mx(codes, scale, "e2m1")
    return nvfp4.dequantize(codes, scale)


def round_weights(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 weights and their row exponents.

    Args: codes and scales as `decode` takes them.
    Returns: float8_e4m3fn [..., N, K], int32 [..., N].
    """
    values = decode(codes, scale)
    exponent = row_exponent(values)
    up = (-exponent).clamp(max=_LARGEST_STEP)  # exact: nothing is that near to the largest float32
    relative = torch.ldexp(torch.ldexp(values, up[..., None]), (-exponent - up)[..., None])
    return e4m3.encode(relative), exponent


def dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The rounded weights [..., N, K] in `dtype`, without scale_2."""
    rounded, exponent = round_weights(codes, scale)
    return torch.ldexp(e4m3.decode(rounded), exponent[..., None]).to(dtype)
