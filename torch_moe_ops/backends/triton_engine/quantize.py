"""Activations as each format rounds them: what the prologue, GEMM1's epilogue and the requantization share.

ACT and HOW as in `formats.OperandFormat`. Values are returned, not codes: all are exact in bfloat16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_moe_ops.backends.triton_engine.elements import nan_unless_finite, reciprocal
from torch_moe_ops.backends.triton_engine.quantize_mx import quantize_mx
from torch_moe_ops.backends.triton_engine.quantize_nvfp4 import dynamic_gscale, quantize_nvfp4
from torch_moe_ops.backends.triton_engine.quantize_scaled import (
    divide_and_round,
    dynamic_scale,
    quantize_fp8_groups,
    round_to_code,
)


@triton.jit
def quantize_given(x, gscale, ACT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """float32 [ROWS, COLUMNS], K along the rows; gscale multiplies."""
    if ACT == "nvfp4":
        y = quantize_nvfp4(x.reshape(ROWS // 16, 16, COLUMNS), gscale, 1).reshape(ROWS, COLUMNS)
    else:
        y = round_to_code(x * gscale + nan_unless_finite(x), ACT)
    return y


@triton.jit
def given_factor(amax, gscale):
    """What multiplies the accumulator of a row of int8 codes: fl(1 / gscale), NaN where the row's amax is."""
    return tl.where(amax == amax, reciprocal(gscale), float("nan"))


@triton.jit
def quantize_mx_blocks(x, ACT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """float32 [ROWS, COLUMNS], K along the rows."""
    return quantize_mx(x.reshape(ROWS // 32, 32, COLUMNS), ACT, 1).reshape(ROWS, COLUMNS)


@triton.jit
def quantize_groups(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """fp8 per 128 of K, which goes along the rows: values, and scales [ROWS / 128, COLUMNS]."""
    y, scale = quantize_fp8_groups(x.reshape(ROWS // 128, 128, COLUMNS), 1)
    return y.reshape(ROWS, COLUMNS), scale.reshape(ROWS // 128, COLUMNS)


@triton.jit
def quantize_row(x, amax, ACT: tl.constexpr, SIZE: tl.constexpr):
    """float32 [SIZE] of a row whose largest magnitude is amax (NaN: see `elements.amax_along`).

    Returns values, and what multiplies the accumulator.
    """
    if ACT == "nvfp4":
        gscale = dynamic_gscale(amax)
        y = quantize_given(x.reshape(SIZE, 1), gscale, ACT, SIZE, 1).reshape(SIZE)
        factor = reciprocal(gscale)
    else:
        factor = dynamic_scale(amax, ACT)
        y = divide_and_round(x, factor, ACT)
    return y, factor
