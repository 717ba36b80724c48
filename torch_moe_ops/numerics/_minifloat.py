"""Codes of small floats with a sign bit, in general: used where no conversion instruction exists."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Minifloat:
    """A float with subnormals and without infinity; `code = sign << (width - 1) | exponent field | mantissa`."""

    width: int  # bits, sign included
    mantissa_bits: int
    min_exponent: int  # of the smallest normal, and of all subnormals
    max: float
    nan_code: int | None = None  # magnitude bits of NaN; None: there is none, NaN saturates

    def encode(self, y: Tensor) -> Tensor:
        """uint8 codes of float32 or float64 y: nearest, ties to even, saturating. IEEE sign, but + for NaN."""
        is_nan = y.isnan()
        # After fmin a NaN is the maximum.
        a = torch.fmin(y.abs(), y.new_full((), self.max))
        # Subnormals share the unit of the smallest normal; zero, whose own exponent would be 0, is one of them.
        exponent = torch.frexp(a.clamp_min(2.0**self.min_exponent)).exponent - 1
        # Units of the last place: a power of two, so the product is exact and round() is the only rounding.
        units = torch.ldexp(a, self.mantissa_bits - exponent).round().to(torch.int32)
        # Subnormals and the first binade run on from 0; a carry out of the mantissa is the next exponent's code.
        code = units + ((exponent - self.min_exponent) << self.mantissa_bits)
        if self.nan_code is not None:
            code = torch.where(is_nan, self.nan_code, code)
        sign = torch.signbit(y).logical_and_(~is_nan)
        return (code | (sign.to(torch.int32) << (self.width - 1))).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """float32 values of uint8 codes; for formats without NaN. Exact."""
        magnitude = codes.to(torch.int32) & ((1 << (self.width - 1)) - 1)
        field = magnitude >> self.mantissa_bits
        mantissa = magnitude & ((1 << self.mantissa_bits) - 1)
        units = torch.where(field > 0, mantissa + (1 << self.mantissa_bits), mantissa)
        exponent = (field - 1).clamp_min(0) + (self.min_exponent - self.mantissa_bits)
        value = torch.ldexp(units.float(), exponent)
        return torch.where((codes >> (self.width - 1)).bool(), -value, value)
