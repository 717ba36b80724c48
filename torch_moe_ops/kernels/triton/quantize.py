"""NVFP4 quantization of activations, bit for bit the CPU reference's.

Results are returned as values, not codes: code * block scale needs six significant bits, so bfloat16
holds it exactly and the GEMMs multiply it as it is.
"""

from __future__ import annotations

import triton
import triton.language as tl

ONE_SIXTH = tl.constexpr(0.16666667163372040)  # 0x3E2AAAAB, fl(1 / 6)
E4M3_MAX = tl.constexpr(448.0)
GSCALE_RANGE = tl.constexpr(2688.0)  # 448 * 6
SMALLEST_NORMAL = tl.constexpr(0.015625)  # of e4m3: 2^-6


@triton.jit
def round_to_e4m3(s):
    """The e4m3 value nearest to s (ties to even), for float32 s in [0, 448]. NaN stays NaN."""
    bits = s.to(tl.uint32, bitcast=True)
    bits = bits + 0x7FFFF + ((bits >> 20) & 1)
    normal = (bits & 0xFFF00000).to(tl.float32, bitcast=True)
    # Below 2^-6 the step is 2^-9: adding and taking away 2^14 rounds to it, as 2^14 has ulp 2^-9.
    subnormal = (s + 16384.0) - 16384.0
    return tl.where(s < SMALLEST_NORMAL, subnormal, normal)


@triton.jit
def round_to_e2m1(y):
    """The e2m1 value nearest to y (ties to even code, saturating at 6), sign kept, float32."""
    magnitude = tl.abs(y)
    # 1.5 * 2^23 times the step (0.5, 1, 2) has that step as its ulp.
    shift = tl.where(magnitude < 2.0, 6291456.0, tl.where(magnitude < 4.0, 12582912.0, 25165824.0))
    rounded = (magnitude + shift) - shift
    # A NaN row may hold anything, but nothing that another row could see.
    rounded = tl.minimum(rounded, 6.0)
    return tl.where(y < 0.0, -rounded, rounded)


@triton.jit
def narrow(x, DTYPE: tl.constexpr, USE_PTX: tl.constexpr):
    """float32 x rounded to the nearest DTYPE, ties to even."""
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
def dynamic_gscale(amax):
    """fl(2688 / amax), 1 for a row of zeros."""
    safe = tl.where(amax == 0.0, 1.0, amax)
    return tl.where(amax == 0.0, 1.0, tl.div_rn(GSCALE_RANGE, safe))


@triton.jit
def quantize_blocks(x, gscale, AXIS: tl.constexpr):
    """x: float32, the blocks of 16 along AXIS; gscale multiplies. Returns code * block scale.

    The order of operations is the contract's: any contraction or reassociation would move ties.
    """
    largest = tl.max(tl.abs(x), axis=AXIS, keep_dims=True)
    scale = round_to_e4m3(tl.minimum(gscale * (largest * ONE_SIXTH), E4M3_MAX))
    zero = scale == 0.0
    divisor = tl.where(zero, 1.0, scale) * reciprocal(gscale)
    factor = tl.where(zero, 0.0, reciprocal(divisor))
    return round_to_e2m1(x * factor) * scale


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
