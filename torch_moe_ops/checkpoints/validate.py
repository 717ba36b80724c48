"""Values that would silently spoil an expert: refused at load, with tensor and expert in the message.

Every check is one reduction over the stored tensor; only what fails is searched for the value to name.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_moe_ops.checkpoints.linear import Linear

_E8M0_NAN = 255
_PIECE = 1 << 17  # elements
_UNCALIBRATED = (
    ". An expert that no calibration token reached; input_scales=False loads without calibrated input scales"
)


def positive_scalar(linear: Linear, part: str, *, is_input: bool = False) -> Tensor:
    """A per-tensor scale as float32 [], finite and greater than zero."""
    value = linear.scalar(part)
    number = value.item()
    if not math.isfinite(number) or number <= 0:
        raise linear.fail(part, "be finite and positive", f"{number}{_UNCALIBRATED if is_input else ''}")
    return value


def reciprocal_scalar(linear: Linear, part: str, *, is_input: bool = False) -> Tensor:
    """1 / the stored value, once, in float32: for files that keep the factor that quantizes."""
    value = positive_scalar(linear, part, is_input=is_input)
    result = value.reciprocal()
    if not math.isfinite(result.item()) or result.item() == 0:
        raise linear.fail(part, "have a finite reciprocal", value)
    return result


def check_block_scales(linear: Linear, part: str, scale: Tensor, *, signed: bool = False) -> None:
    """No NaN, no infinity, no negative scale unless `signed`, and not all of them zero.

    One zero is legal, as a block may be all zeros; an expert whose scales are all zero was never written.
    """
    if not scale.numel():
        return  # its shape is refused where it is compared with that of the codes
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        scale = scale.view(torch.float8_e8m0fnu)
        largest = int(_flat(scale, torch.uint8).max())
        good = largest != _E8M0_NAN
    else:
        kind, largest = _FLOATS[scale.dtype], _largest(scale)
        good = largest <= kind.finite and (signed or int(_flat(scale, kind.integers).min()) >= 0)
    if not good:  # or a zero has a sign
        _check_each_scale(linear, part, scale, signed)
    if largest == 0:
        raise linear.fail(part, "hold a scale that is not zero", f"{scale.numel()} zeros")


def _check_each_scale(linear: Linear, part: str, scale: Tensor, signed: bool) -> None:
    values = scale.float()
    bad = ~values.isfinite() if signed else ~(values.isfinite() & (values >= 0))
    if bool(bad.any()):
        position = _first(bad)
        requirement = "hold finite scales" if signed else "hold finite scales, zero or greater"
        raise linear.fail(part, requirement, f"{values[position].item()} at {position}")


def check_numbers(linear: Linear, part: str, values: Tensor) -> Tensor:
    """`values` (weights or a bias, floats or e4m3 codes), which hold no NaN."""
    if values.numel() and _largest(values) > _FLOATS[values.dtype].number:
        raise linear.fail(part, "hold no NaN", f"one at {_first(values.float().isnan())}")
    return values


class _Float(NamedTuple):
    """The bits of a float dtype as integers that order its magnitudes.

    finite, number: bits of the largest finite value, and of the largest value that is not NaN.
    """

    integers: torch.dtype
    magnitude: int
    finite: int
    number: int


_FLOATS = {
    torch.float8_e4m3fn: _Float(torch.int8, 0x7F, 0x7E, 0x7E),
    torch.float16: _Float(torch.int16, 0x7FFF, 0x7BFF, 0x7C00),
    torch.bfloat16: _Float(torch.int16, 0x7FFF, 0x7F7F, 0x7F80),
    torch.float32: _Float(torch.int32, 0x7FFFFFFF, 0x7F7FFFFF, 0x7F800000),
}


def _largest(values: Tensor) -> int:
    """The largest magnitude, in pieces that stay in the cache.

    By numpy: torch's reductions take several threads for each small matrix, which costs more than it gains, and
    their masks as much memory as the matrix.
    """
    kind = _FLOATS[values.dtype]
    bits = _flat(values, kind.integers)
    mask = bits.dtype.type(kind.magnitude)
    return max(int((bits[i : i + _PIECE] & mask).max()) for i in range(0, bits.size, _PIECE))


def _flat(values: Tensor, integers: torch.dtype) -> np.ndarray:
    """The bits in any order: of a transposed matrix in that of its memory."""
    ordered = values.t() if values.ndim == 2 and values.t().is_contiguous() else values
    return ordered.reshape(-1).view(integers).numpy()


def _first(bad: Tensor) -> tuple[int, ...]:
    return tuple(bad.nonzero()[0].tolist())
