"""Numbers of few bits: rounding to them and decoding them, by float32 and integer arithmetic that every target has."""

from __future__ import annotations

import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)
INT8_MAX = tl.constexpr(127.0)
SMALLEST_NORMAL = tl.constexpr(0.015625)  # of e4m3: 2^-6
SMALLEST_NORMAL_FLOAT = tl.constexpr(1.1754943508222875e-38)  # of float32 and bfloat16: 2^-126
LARGEST_FLOAT = tl.constexpr(3.4028234663852886e38)
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: float32 numbers of this size are integers


@triton.jit
def narrow(x, DTYPE: tl.constexpr, USE_PTX: tl.constexpr):
    """float32 x rounded to the nearest DTYPE, ties to even; for int8 x must be an integer in range."""
    if USE_PTX or tl.bfloat16 != DTYPE:
        y = x.to(DTYPE)
    else:
        # Triton's interpreter cuts bfloat16 off instead of rounding it.
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        y = tl.where(x == x, rounded, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return y


@triton.jit
def reciprocal(x):
    """fl(1 / x)."""
    return tl.div_rn(1.0, x)


@triton.jit
def nan_unless_finite(x):
    """0, or NaN where x is NaN or infinite: added to a bounded function of x, it shows what the bound hides."""
    return x * 0.0


@triton.jit
def magnitude_bits(x):
    """int32 whose order is that of |x|, with NaN above infinity: a maximum of floats would lose a NaN."""
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def amax_of_bits(bits):
    """The magnitude of these bits; NaN for infinity."""
    amax = bits.to(tl.float32, bitcast=True)
    return amax + nan_unless_finite(amax)


@triton.jit
def amax_along(x, AXIS: tl.constexpr):
    """max |x| along AXIS, which keeps size 1; NaN where one of these elements is NaN or infinite."""
    return amax_of_bits(tl.max(magnitude_bits(x), axis=AXIS, keep_dims=True))


@triton.jit
def round_to_e4m3(s):
    """The e4m3 value nearest to s (ties to even), for float32 s in [0, 448]. NaN stays NaN."""
    bits = s.to(tl.uint32, bitcast=True)
    bits = bits + 0x7FFFF + ((bits >> 20) & 1)
    normal = (bits & 0xFFF00000).to(tl.float32, bitcast=True)
    # Below 2^-6 the step is 2^-9: adding and taking away 2^14 rounds to it, as 2^14 has ulp 2^-9.
    subnormal = (s + 16384.0) - 16384.0
    return tl.where(s >= SMALLEST_NORMAL, normal, subnormal)


@triton.jit
def round_to_e2m1(y):
    """The e2m1 value nearest to y (ties to even code, saturating at 6), sign kept, float32."""
    magnitude = tl.abs(y)
    # 1.5 * 2^23 times the step (0.5, 1, 2) has that step as its ulp.
    shift = tl.where(magnitude < 2.0, 6291456.0, tl.where(magnitude < 4.0, 12582912.0, 25165824.0))
    rounded = (magnitude + shift) - shift
    # NaN becomes 6; the scale of its block is NaN.
    rounded = tl.minimum(rounded, 6.0)
    return tl.where(y < 0.0, -rounded, rounded)


@triton.jit
def round_to_minifloat(y, MANTISSA: tl.constexpr, MIN_EXPONENT: tl.constexpr, LARGEST: tl.constexpr):
    """The nearest value (ties to even, saturating) with MANTISSA bits and subnormals below 2^MIN_EXPONENT; NaN stays.

    Adding and taking away 1.5 * 2^23 times the step rounds to it: a number of that size has the step as its ulp.
    """
    magnitude = tl.minimum(tl.abs(y), LARGEST)
    exponent = tl.maximum(magnitude.to(tl.int32, bitcast=True) >> 23, 127 + MIN_EXPONENT)
    shift = (((exponent + (23 - MANTISSA)) << 23) | (1 << 22)).to(tl.float32, bitcast=True)
    rounded = (magnitude + shift) - shift
    rounded = tl.where(y < 0.0, -rounded, rounded)
    return tl.where(y == y, rounded, y)


@triton.jit
def round_to_int8(y):
    """round(y) within +-127, ties to even; float32. NaN stays."""
    clamped = tl.maximum(y, -INT8_MAX, propagate_nan=tl.PropagateNan.ALL)
    clamped = tl.minimum(clamped, INT8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return (clamped + ROUNDER) - ROUNDER


@triton.jit
def decode_e2m1(codes):
    """float32 values of 4-bit codes (int32, 0..15)."""
    magnitude = codes & 7
    normal = (((magnitude >> 1) + 126) << 23) | ((magnitude & 1) << 22)
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal.to(tl.float32, bitcast=True))
    return tl.where(codes > 7, -value, value)


@triton.jit
def decode_e4m3(byte):
    """float32 values of non-negative e4m3 bytes (int32, 0..126)."""
    normal = ((byte << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    # Not through a float32 subnormal, which a build that flushes those would lose.
    return tl.where(byte < 8, byte.to(tl.float32) * 0.001953125, normal)


@triton.jit
def decode_minifloat(code, ELEMENT: tl.constexpr):
    """float32 values of codes (int32) of "e4m3" (0..255), "e3m2" or "e2m3" (0..63); the NaN of e4m3 is 480."""
    width: tl.constexpr = 8 if ELEMENT == "e4m3" else 6
    mantissa: tl.constexpr = 2 if ELEMENT == "e3m2" else 3
    bias: tl.constexpr = 7 if ELEMENT == "e4m3" else 3 if ELEMENT == "e3m2" else 1
    step: tl.constexpr = 2.0 ** (1 - bias - mantissa)
    magnitude = code & ((1 << (width - 1)) - 1)
    normal = ((magnitude << (23 - mantissa)) + ((127 - bias) << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < (1 << mantissa), magnitude.to(tl.float32) * step, normal)
    return tl.where(code != magnitude, -value, value)


@triton.jit
def decode_e8m0(byte):
    """float32 2^(byte - 127) of e8m0 bytes (int32, 0..255); NaN for 255."""
    bits = tl.where(byte == 0, 1 << 22, byte << 23)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def without_subnormals(x):
    """x, but 0 below the smallest normal float: what the contract makes of values of MX blocks."""
    return tl.where(tl.abs(x) < SMALLEST_NORMAL_FLOAT, 0.0, x)
