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
# Products of e4m3 codes on fp8 tensor cores (FP8_SUM_BACKENDS): codes are exact, but Hopper's fp8 units keep 13 bits of
# a sum of 128 products. That moves about one e4m3 code in 500 of the intermediate by a step of 2^-4: this much of a large
# layer's result. Where few values of the intermediate stand behind a result, MOVED_CODE comes on top.
FP8_SUMS = 6e-3
# The same where 13 bits hold every sum.
FP8_SUMS_EXACT = 5e-4
# INT4 weights as bfloat16 operands of the Hopper kernels (cuda_sm90_int4): code times scale has up to fifteen bits and is
# rounded to eight, 2^-8 at most, which is 3.0e-3 to 4.7e-3 of a layer's result (measured). The same weights rounded
# beforehand are met within the classes above. Where few values stand behind a result, and activations bend sharply
# (clamps and sigmoids of large arguments), ROUNDED_INT4_FEW / sqrt(n) comes on top. For hidden states of ordinary size:
# larger ones can make more of it, so that random problems are compared with rounded weights.
ROUNDED_INT4 = 8e-3
ROUNDED_INT4_FEW = 1.5
# The same beside fp8 activations: an intermediate that is off by 2^-9 is now and then rounded to the neighbouring code,
# which is 2^-4 off. 1.0e-2 to 1.4e-2 of a layer's result, 2.3e-2 of its worst row (h200_distances_int4_a8.jsonl).
ROUNDED_INT4_FP8 = 2e-2


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


def rounded_int4(act_format: str) -> float:
    """Of a whole result with INT4 weights that are rounded to bfloat16, from the exact ones."""
    return ROUNDED_INT4 if act_format == "none" else ROUNDED_INT4_FP8


FP8_SUM_BACKENDS = ("triton_fp8", "cuda_sm90_fp8", "cuda_sm90_packed", "cuda_sm90_folded")

# A value of the intermediate beside a tie of its code lands on either side of it: by the order of float32 sums now and
# then, by sums of few bits often. One moved code of n values is b / sqrt(n) of the result: its value as a multiple of
# their root mean square (10 and more occur) times the relative step of a code. b, by activation format; the fp8 backends'
# is measured (scripts/measure_bounds.py and random problems: benchmarks/results, h200_bounds.jsonl and h200_fuzz_problems.jsonl).
MOVED_CODE = {
    "none": 0.08,  # rounded to 16 bits
    "nvfp4": 4.0,
    "mxfp4": 4.0,
    "mxfp6_e3m2": 2.0,
    "mxfp6_e2m3": 2.0,
    "mxfp8": 1.5,
    "fp8": 2.0,
    "int8": 1.0,
}


# Squares vary more: the largest of n values is a larger multiple of their root mean square.
SQUARES = 2.0


def layer_bound(backend: str, act_format: str, dtype: torch.dtype, values: int, activation: str = "") -> float:
    """Class 2 for a result of `dtype` of any size, a whole one or a row of it.

    values: of the intermediate behind the result, tokens * top_k * intermediate size where ids differ and are ours.
    """
    base = bound(dtype, act_format)
    if backend in FP8_SUM_BACKENDS:
        base = bound(dtype) + FP8_SUMS
    if backend == "cuda_sm90_int4":
        base = max(base, rounded_int4(act_format)) + ROUNDED_INT4_FEW / max(1, values) ** 0.5
    moved = MOVED_CODE[act_format] * (SQUARES if activation.startswith("relu2") else 1.0)
    return base + moved / max(1, values) ** 0.5


def fp8_sums_bound(values: int, dtype: torch.dtype = torch.float32) -> float:
    """`layer_bound` of the backends that multiply e4m3 codes on fp8 tensor cores."""
    return layer_bound(FP8_SUM_BACKENDS[0], "fp8", dtype, values)
