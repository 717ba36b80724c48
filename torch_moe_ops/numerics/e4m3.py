"""e4m3fn (fp8): max 448, smallest normal 2^-6, subnormal step 2^-9, NaN but no infinity.

Source: OCP 8-bit Floating Point Specification v1.0; torch.float8_e4m3fn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_moe_ops.numerics._minifloat import Minifloat

MAX = 448.0
SMALLEST = 2.0**-9

_FORMAT = Minifloat(width=8, mantissa_bits=3, min_exponent=-6, max=MAX, nan_code=0x7F)


def encode(x: Tensor) -> Tensor:
    """Nearest float8_e4m3fn of each element, ties to even, saturating at 448; subnormals kept, NaN is code 0x7f.

    Args:
        x: bfloat16, float16, float32 or float64 (rounded once, not by way of float32), any shape.
    """
    if x.dtype == torch.float64:
        return _FORMAT.encode(x).view(torch.float8_e4m3fn)
    # torch's cast makes NaN of what is beyond 448, in some releases; clamp saturates, and keeps NaN. The sign of a NaN
    # that arithmetic made depends on the machine, and torch's cast keeps it: nan_to_num makes all of them positive.
    bounded = x.float().clamp(-MAX, MAX).nan_to_num_(nan=torch.nan)
    return bounded.to(torch.float8_e4m3fn)


def decode(codes: Tensor) -> Tensor:
    """float32 values, same shape. Exact."""
    return codes.float()
