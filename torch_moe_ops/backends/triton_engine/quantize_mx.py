"""Quantization of activations to the MX formats, bit for bit the CPU reference's.

Results are values, element * 2^exponent: at most four significant bits, exact in bfloat16 as those below 2^-126 count
as zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_moe_ops.backends.triton_engine.elements import (
    amax_along,
    decode_e8m0,
    round_to_minifloat,
    without_subnormals,
)


@triton.jit
def quantize_mx(x, FORMAT: tl.constexpr, AXIS: tl.constexpr):
    """x: float32, the blocks of 32 along AXIS; FORMAT: "mxfp8", "mxfp4", "mxfp6_e3m2" or "mxfp6_e2m3".

    The exponent is ceil(log2(amax / largest element)), taken from the bits of fl(amax / largest): it carries unless
    the mantissa is 0, and quotients up to 2^-127 (subnormals) have byte 0. Scaling by a power of two is exact. A block
    with NaN or an infinity is NaN.
    """
    mantissa: tl.constexpr = 1 if FORMAT == "mxfp4" else 2 if FORMAT == "mxfp6_e3m2" else 3
    smallest: tl.constexpr = -6 if FORMAT == "mxfp8" else -2 if FORMAT == "mxfp6_e3m2" else 0
    largest: tl.constexpr = (
        448.0 if FORMAT == "mxfp8" else 28.0 if FORMAT == "mxfp6_e3m2" else 6.0 if FORMAT == "mxfp4" else 7.5
    )
    amax = amax_along(x, AXIS)
    bits = tl.div_rn(amax, largest).to(tl.int32, bitcast=True)
    byte = tl.where(bits <= (1 << 22), 0, (bits + 0x7FFFFF) >> 23)
    byte = tl.where(amax == amax, tl.minimum(byte, 254), 255)
    element = round_to_minifloat(x * decode_e8m0(254 - byte), mantissa, smallest, largest)
    return without_subnormals(element * decode_e8m0(byte))
