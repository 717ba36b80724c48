"""NVFP4 quantization of activations, bit for bit the CPU reference's.

Results are returned as values, not codes: code * block scale needs six significant bits, so bfloat16
holds it exactly and the GEMMs multiply it as it is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_moe_ops.backends.triton_engine.elements import (
    E4M3_MAX,
    LARGEST_FLOAT,
    amax_along,
    reciprocal,
    round_to_e2m1,
    round_to_e4m3,
)

ONE_SIXTH = tl.constexpr(0.16666667163372040)  # 0x3E2AAAAB, fl(1 / 6)
GSCALE_RANGE = tl.constexpr(2688.0)  # 448 * 6
GSCALE_MAX = tl.constexpr(3.3230699894622897e35)  # 2^118: no reciprocal overflows with it


@triton.jit
def dynamic_gscale(amax):
    """min(fl(2688 / amax), 2^118), 1 for a row of zeros, NaN for NaN."""
    safe = tl.where(amax == 0.0, 1.0, amax)
    gscale = tl.minimum(tl.div_rn(GSCALE_RANGE, safe), GSCALE_MAX, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(amax == 0.0, 1.0, gscale)


@triton.jit
def quantize_nvfp4(x, gscale, AXIS: tl.constexpr):
    """x: float32, the blocks of 16 along AXIS; gscale multiplies. Returns code * block scale.

    The order of operations is the contract's: any contraction or reassociation would move ties. A NaN passes through
    to the scale.
    """
    wanted = gscale * (amax_along(x, AXIS) * ONE_SIXTH)
    scale = round_to_e4m3(tl.minimum(wanted, E4M3_MAX, propagate_nan=tl.PropagateNan.ALL))
    zero = scale == 0.0
    divisor = tl.where(zero, 1.0, scale) * reciprocal(gscale)
    factor = tl.where(zero, 0.0, tl.minimum(reciprocal(divisor), LARGEST_FLOAT))
    return round_to_e2m1(x * factor) * scale
