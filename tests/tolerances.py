"""The three tolerance classes, each stated once.

1. exact: codes, layouts, routing ids, prepare and restore: torch.equal on bytes.
2. kernel against the oracle that emulates every rounding step: relative L2 below these bounds.
3. quality of a scheme against unquantized weights: see test_quant_*.
"""

from __future__ import annotations

import torch
from torch import Tensor

# float32 arithmetic in another order.
F32 = 1e-5
# The result is rounded once to bfloat16 (2^-9 relative at most, 0.0017 in the mean square).
BF16 = 4e-3
F16 = 1e-3
# A backend's W4A4 against the emulating oracle: the same codes, another order of float32 sums; a
# sum that lands on the other side of a rounding boundary moves one code of the intermediate.
W4A4 = 2e-3
# NVFP4 weights rounded to e4m3, on fp8 tensor cores (weight_policy "packed" and "folded"): codes are exact, but Hopper's
# fp8 units keep 13 bits of a sum of 128 products. That moves about one e4m3 code in 500 of the intermediate by a step of
# 2^-4: 2.3e-3 to 3.2e-3 of a layer's result, up to 1e-2 where one of few tokens has a code that weighs much (measured;
# docs/hopper.md, section 10). The policies are 5e-2 from "exact". With sums that 13 bits hold, 5e-4.
FP8_SUMS = 1.5e-2
FP8_SUMS_EXACT = 5e-4
# INT4 weights as bfloat16 operands of the Hopper kernels (cuda_sm90_int4): code times scale has up to fifteen bits and is
# rounded to eight, 2^-8 at most, which is 3.0e-3 to 4.7e-3 of a layer's result (measured). The same weights rounded
# beforehand are met within the classes above.
ROUNDED_INT4 = 8e-3


def relative_l2(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| in float64; 0 where both are zero."""
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    norm = expected.norm().item()
    error = (actual - expected).norm().item()
    return error / norm if norm else error


def bound(dtype: torch.dtype, act_format: str = "none") -> float:
    """Class 2 for a result of `dtype`."""
    rounding = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16}[dtype]
    return rounding if act_format == "none" else max(rounding, W4A4)


# A code of the intermediate beside a tie lands on either side of it, by the order of float32 sums or by sums of few bits.
# What such a code can weigh, as a multiple of the intermediate's root mean square: values of 10 of that occur, times the
# step of a code. It counts in small outputs, whose intermediate has few values.
MOVED_CODE = {
    "none": 0.0,
    "nvfp4": 4.0,
    "mxfp4": 4.0,
    "mxfp6_e3m2": 2.0,
    "mxfp6_e2m3": 2.0,
    "mxfp8": 1.0,
    "fp8": 1.0,
    "int8": 1.0,
}
FP8_SUM_BACKENDS = ("triton_fp8", "cuda_sm90_fp8", "cuda_sm90_packed", "cuda_sm90_folded")


def layer_bound(backend: str, act_format: str, dtype: torch.dtype, values: int) -> float:
    """Class 2 for a result of `dtype` of any size. values: of the intermediate behind it, tokens * top_k * width."""
    base = bound(dtype, act_format)
    if backend in FP8_SUM_BACKENDS:
        base = max(base, FP8_SUMS)
    if backend == "cuda_sm90_int4":
        base = max(base, ROUNDED_INT4)
    return base + MOVED_CODE[act_format] / max(1, values) ** 0.5
