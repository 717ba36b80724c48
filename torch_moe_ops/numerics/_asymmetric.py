"""Signed integer codes with zero points, for integers of any width."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_moe_ops.numerics._arithmetic import divide


def quantize_asymmetric(groups: Tensor, bits: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize groups in the form of compressed-tensors.

    With low = -2^(bits - 1) and high = -low - 1: scale = (max - min) / (2^bits - 1) with max >= 0 >= min, epsilon of
    scale_dtype where that is 0; zero = clamp(round(low - min / scale), low, high), 0 in a group of zeros;
    code = clamp(round(w / scale + zero), low, high). Each operation is rounded to scale_dtype, ties to even.

    Args:
        groups: float32 [..., group].
    Returns: codes float32 [..., group], whole numbers; scale of scale_dtype [...], multiplies; zero float32 [...].
    """

    def rounded(t: Tensor) -> Tensor:
        return t.to(scale_dtype).float()

    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    smallest, largest = groups.amin(-1).clamp_max_(0), groups.amax(-1).clamp_min_(0)
    scale = epsilon_for_zero(divide(rounded(largest - smallest), 2**bits - 1).to(scale_dtype))
    zero = rounded(low - rounded(divide(smallest, scale.float())))
    zero = zero.clamp_(low, high).round_().masked_fill_(smallest == largest, 0)
    quotient = rounded(rounded(divide(groups, scale.float()[..., None])) + zero[..., None])
    return quotient.round_().clamp_(low, high), scale, zero


def epsilon_for_zero(scale: Tensor) -> Tensor:
    """scale, and its dtype's epsilon where it is 0; in place."""
    return scale.masked_fill_(scale == 0, torch.finfo(scale.dtype).eps)
