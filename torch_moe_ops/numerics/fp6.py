"""The two fp6 elements, e3m2 and e2m3: one code a byte, or four codes in three bytes.

| element | bias | max | smallest normal | subnormal step |
| e3m2    | 3    | 28  | 2^-2            | 2^-4           |
| e2m3    | 1    | 7.5 | 2^0             | 2^-3           |

Neither has infinity or NaN. Source: OCP Microscaling Formats (MX) v1.0, section 5.3.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_moe_ops.numerics._arithmetic import require_dtype
from torch_moe_ops.numerics._blocks import split_blocks
from torch_moe_ops.numerics._minifloat import Minifloat

_FORMATS = {
    "e3m2": Minifloat(width=6, mantissa_bits=2, min_exponent=-2, max=28.0),
    "e2m3": Minifloat(width=6, mantissa_bits=3, min_exponent=0, max=7.5),
}
ELEMENTS = tuple(_FORMATS)


def encode(y: Tensor, element: str) -> Tensor:
    """Nearest code of each element, ties to even, saturating; the sign bit is the IEEE sign.

    Args:
        y: bfloat16, float16, float32 or float64, any shape. NaN is outside the contract and saturates.
        element: "e3m2" or "e2m3".
    Returns: uint8, same shape, one code (0..63) a byte.
    """
    return _format(element).encode(y if y.dtype == torch.float64 else y.float())


def decode(codes: Tensor, element: str) -> Tensor:
    """float32 values of uint8 codes (0..63), same shape. Exact."""
    return _format(element).decode(codes)


def pack(codes: Tensor) -> Tensor:
    """Four 6-bit codes in three bytes, as a little-endian stream of bits.

    Code i of a group occupies bits 6i .. 6i + 5 of the 24-bit word byte[0] | byte[1] << 8 | byte[2] << 16.

    Args:
        codes: uint8 [..., K], each below 64, K % 4 == 0.
    Returns: uint8 [..., K * 3 / 4].
    """
    require_dtype("fp6.pack", "codes", codes, torch.uint8)
    a, b, c, d = split_blocks("fp6.pack", "codes", codes, 4).unbind(-1)
    return torch.stack((a | (b << 6), (b >> 2) | (c << 4), (c >> 4) | (d << 2)), dim=-1).flatten(-2)


def unpack(packed: Tensor) -> Tensor:
    """Inverse of pack: uint8 [..., K * 3 / 4] -> uint8 codes [..., K]."""
    require_dtype("fp6.unpack", "packed", packed, torch.uint8)
    x, y, z = split_blocks("fp6.unpack", "packed", packed, 3).unbind(-1)
    codes = (x & 63, (x >> 6) | ((y & 15) << 2), (y >> 4) | ((z & 3) << 4), z >> 2)
    return torch.stack(codes, dim=-1).flatten(-2)


def _format(element: str) -> Minifloat:
    if element not in _FORMATS:
        raise ValueError(f"fp6: element must be one of {list(ELEMENTS)}, got {element!r}")
    return _FORMATS[element]
