"""e2m1 (fp4): 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; code = sign << 3 | index.

No code for infinity or NaN. Two codes share a byte, the even element in the low nibble.
Source: OCP Microscaling Formats (MX) v1.0, section 5.3.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_moe_ops.numerics._nibbles import pack, unpack

__all__ = ["MAX", "decode", "decode_packed", "encode", "pack", "unpack"]

MAX = 6.0


@torch.no_grad()
def encode(y: Tensor) -> Tensor:
    """Nearest e2m1 code of each element, ties to the even code, saturating at 6.

    Args:
        y: bfloat16, float16, float32 or float64, any shape.
    Returns: uint8, same shape, one code (0..15) an element. The sign bit is the IEEE sign of y, so -0.0 and
        negatives that round to zero give 8. Infinity saturates; NaN is outside the contract and gives
        code 7, whatever its sign.
    """
    a = y.abs() if y.dtype == torch.float64 else y.float().abs()
    # As a function of the value the code is concave: 2a up to 2, a + 2 up to 4, a / 2 + 4 beyond. So the
    # least of the three roundings is the right one, and round() takes ties to even codes as required.
    # In place, because fresh memory for every step costs more than the arithmetic.
    code = (a * 2).round_()
    torch.minimum(code, a.round().add_(2), out=code)
    torch.minimum(code, a.mul_(0.5).round_().add_(4), out=code)
    code = code.clamp_max_(7).nan_to_num_(nan=7).to(torch.uint8)
    # 0 * infinity is a negative NaN on x86 and a positive one on CUDA: its sign must not reach the code.
    sign = torch.signbit(y).logical_and_(y == y)
    return code | (sign.to(torch.uint8) << 3)


def decode(codes: Tensor) -> Tensor:
    """float32 value of each uint8 code (0..15), same shape; code 8 is -0.0. Exact."""
    index = (codes & 7).to(torch.int32)
    # From index 2 on, exponent (index >> 1) - 1 and mantissa bit index & 1 sit side by side in float32 too.
    normal = ((index + (126 << 1)) << 22).view(torch.float32)
    magnitude = torch.where(index < 2, index * 0.5, normal)
    return torch.where(codes >= 8, -magnitude, magnitude)


def decode_packed(packed: Tensor) -> Tensor:
    """float32 values [..., K] of packed codes uint8 [..., K / 2]. Exact."""
    # One look-up a byte instead of arithmetic on each nibble. The table is computed on the device: a copy
    # from the host could not be captured in a CUDA graph.
    table = decode(unpack(torch.arange(256, device=packed.device, dtype=torch.uint8)[:, None]))
    values = table.index_select(0, packed.to(torch.int32).flatten())
    return values.view(*packed.shape[:-1], 2 * packed.shape[-1])
