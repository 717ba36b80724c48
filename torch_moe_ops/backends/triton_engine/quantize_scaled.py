"""fp8 and int8 quantization of activations with a float32 scale, bit for bit the CPU reference's.

Codes are returned as the float32 values that they stand for; the scale multiplies the accumulator.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_moe_ops.backends.triton_engine.elements import (
    E4M3_MAX,
    INT8_MAX,
    amax_along,
    round_to_int8,
    round_to_minifloat,
)


@triton.jit
def round_to_code(y, FORMAT: tl.constexpr):
    """The value of the nearest code of "fp8" or "int8", saturating."""
    if FORMAT == "fp8":
        return round_to_minifloat(y, 3, -6, 448.0)
    else:
        tl.static_assert(FORMAT == "int8", "unknown activation format")
        return round_to_int8(y)


@triton.jit
def dynamic_scale(amax, FORMAT: tl.constexpr):
    """fl(amax / largest code), 1 where that is 0, NaN for NaN; multiplies to dequantize."""
    scale = tl.div_rn(amax, E4M3_MAX if FORMAT == "fp8" else INT8_MAX)
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def divide_and_round(x, scale, FORMAT: tl.constexpr):
    """Codes of fl(x / scale); scale: a scalar, or of a shape that broadcasts."""
    return round_to_code(tl.div_rn(x, tl.zeros_like(x) + scale), FORMAT)


@triton.jit
def quantize_fp8_groups(x, AXIS: tl.constexpr):
    """x: float32, the groups of 128 along AXIS. Returns codes, and the scale of each group (AXIS of size 1)."""
    scale = dynamic_scale(amax_along(x, AXIS), "fp8")
    return divide_and_round(x, scale, "fp8"), scale
