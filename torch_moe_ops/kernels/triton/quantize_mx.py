"""Quantization of activations to the MX formats, bit for bit the CPU reference's.

Results are values, element * 2^exponent: at most four significant bits, exact in bfloat16 unless both an element and
its exponent are next to the smallest there is (below 2^-133).
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_moe_ops.kernels.triton.elements import decode_e8m0, round_to_minifloat


@triton.jit
def quantize_mx(x, FORMAT: tl.constexpr, AXIS: tl.constexpr):
    """x: float32, the blocks of 32 along AXIS; FORMAT: "mxfp8", "mxfp4", "mxfp6_e3m2" or "mxfp6_e2m3".

    The exponent is ceil(log2(amax / largest element)), taken from the bits of fl(amax / largest): it carries unless
    the mantissa is 0, and quotients up to 2^-127 (subnormals) have byte 0. Scaling by a power of two is exact.
    """
    mantissa: tl.constexpr = 1 if FORMAT == "mxfp4" else 2 if FORMAT == "mxfp6_e3m2" else 3
    smallest: tl.constexpr = -6 if FORMAT == "mxfp8" else -2 if FORMAT == "mxfp6_e3m2" else 0
    largest: tl.constexpr = (
        448.0 if FORMAT == "mxfp8" else 28.0 if FORMAT == "mxfp6_e3m2" else 6.0 if FORMAT == "mxfp4" else 7.5
    )
    amax = tl.max(tl.abs(x), axis=AXIS, keep_dims=True)
    bits = tl.div_rn(amax, largest).to(tl.int32, bitcast=True)
    byte = tl.where(bits <= (1 << 22), 0, (bits + 0x7FFFFF) >> 23)
    byte = tl.minimum(byte, 254)
    return round_to_minifloat(x * decode_e8m0(254 - byte), mantissa, smallest, largest) * decode_e8m0(byte)
