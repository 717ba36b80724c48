"""e8m0 block exponents: byte b is 2^(b - 127), 255 is NaN. Stored as uint8.

Byte 0 is 2^-127, a subnormal float32: arithmetic that flushes subnormals turns it into 0.
Source: OCP Microscaling Formats (MX) v1.0, sections 5.4.1 and 6.3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_moe_ops.numerics._arithmetic import divide

RULES = ("floor", "rceil", "even")
NAN = 255


class _Element(NamedTuple):
    max: float
    max_exponent: int  # floor(log2(max))
    mantissa_bits: int


_ELEMENTS = {
    "e2m1": _Element(6.0, 2, 1),
    "e4m3": _Element(448.0, 8, 3),
    "e3m2": _Element(28.0, 4, 2),
    "e2m3": _Element(7.5, 2, 3),
}
ELEMENTS = tuple(_ELEMENTS)


def encode_block_exponent(amax: Tensor, element: str, rule: str) -> Tensor:
    """Exponent byte of blocks whose largest magnitude is amax; exact, from the bits of float32.

    floor: floor(log2 amax) - max_exponent (OCP). Values up to twice the largest element may clip.
    rceil: ceil(log2 fl(amax / max)) (ModelOpt, cuBLAS). Does not clip.
    even:  floor(log2) of the sum of amax and half a last place of the element, minus max_exponent
           (compressed-tensors, gpt-oss style).

    Args:
        amax: bfloat16, float16 or float32, >= 0, any shape.
        element: "e2m1", "e4m3", "e3m2" or "e2m3".
    Returns: uint8, same shape, clamped to [0, 254]; 0 for a zero block, 255 (NaN) where amax is infinite or NaN.
    """
    if element not in _ELEMENTS:
        raise ValueError(f"e8m0.encode_block_exponent: element must be one of {list(ELEMENTS)}, got {element!r}")
    if rule not in RULES:
        raise ValueError(f"e8m0.encode_block_exponent: rule must be one of {list(RULES)}, got {rule!r}")
    spec = _ELEMENTS[element]
    amax = amax.float()
    if rule == "rceil":
        bits = divide(amax, spec.max).view(torch.int32)
        # Carries into the exponent unless the mantissa is 0. Subnormals up to 2^-127 belong to byte 0.
        byte = torch.where(bits <= 1 << 22, 0, (bits + 0x7FFFFF) >> 23)
    else:
        bits = amax.contiguous().view(torch.int32)
        if rule == "even":
            bits = bits + (1 << (22 - spec.mantissa_bits))
        byte = (bits >> 23) - spec.max_exponent
    return byte.clamp_(0, 254).masked_fill_(~amax.isfinite(), NAN).to(torch.uint8)


def decode(byte: Tensor) -> Tensor:
    """float32 2^(byte - 127) of uint8 bytes; NaN for 255. Exact."""
    exponent = byte.to(torch.int32)
    bits = (exponent << 23).masked_fill_(exponent == 0, 1 << 22).masked_fill_(exponent == 255, 0x7FC00000)
    return bits.view(torch.float32)
