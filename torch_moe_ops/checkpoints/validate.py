"""Scales that would silently spoil an expert: refused at load, with tensor and expert in the message."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_moe_ops.checkpoints.linear import Linear

_E8M0_NAN = 255
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
    """No NaN, no infinity, and no negative scale unless `signed`. Zero is legal: a block may be all zeros."""
    if scale.dtype == torch.float8_e4m3fn:
        magnitude = scale.view(torch.uint8) & 0x7F
        bad = (magnitude == 0x7F) | ((scale.view(torch.uint8) > 0x80) if not signed else False)
    elif scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        bad = scale.view(torch.uint8) == _E8M0_NAN
    else:
        bad = ~torch.isfinite(scale) if signed else ~(torch.isfinite(scale) & (scale >= 0))
    if bool(bad.any()):
        position = tuple(bad.nonzero()[0].tolist())
        requirement = "hold finite scales" if signed else "hold finite scales, zero or greater"
        got = scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale
        raise linear.fail(part, requirement, f"{got[position].float().item()} at {position}")
