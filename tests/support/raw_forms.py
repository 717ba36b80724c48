"""Random layers in every form that the scales of a scheme may have, of which quantize_experts makes one."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from problems import Case, make_raw
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.core.schemes import FLOATS, SCHEMES, ZERO_POINT_DTYPES


@dataclass(frozen=True)
class Form:
    """scales: values of K in a group, "rows", "halves" or "matrix"; "" as quantize_experts has them.

    dtypes, zero_points: of w13 and of w2.
    """

    scales: str = ""
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.bfloat16, torch.bfloat16)
    zero_points: tuple[bool, bool] = (False, False)

    @property
    def multiple(self) -> int:
        """What sizes must be a multiple of besides."""
        return int(self.scales) if self.scales.isdigit() else 1

    @staticmethod
    def drawn(g: random.Random, scheme: str) -> Form:
        scales = g.choice({"int4": _GROUPS, "int8": _GROUPS, "fp8": ("rows", "halves", "matrix")}.get(scheme, ("",)))
        dtypes = g.choice(FLOATS), g.choice(FLOATS)
        points = (g.random() < 0.5, g.random() < 0.5) if SCHEMES[scheme].has_zero_point else (False, False)
        same = g.random() < 0.6  # in both weights
        return Form(scales, (dtypes[0],) * 2 if same else dtypes, (points[0],) * 2 if same else points)


_GROUPS = ("32", "64", "128", "rows")


def raw_of(case: Case, form: Form) -> moe.RawWeights:
    """A layer in a form; sizes are multiples of the form's and of the scheme's."""
    if case.scheme == "fp8":
        return _of_matrices(make_raw(case), form.scales)
    return make_raw(case) if form.scales == "" else _of_codes(case, form)


def _of_matrices(raw: moe.RawWeights, scales: str) -> moe.RawWeights:
    if scales in ("", "rows"):
        return raw
    assert raw.w13_scale is not None and raw.w2_scale is not None
    halves = 2 if scales == "halves" and raw.is_gated else 1
    w13 = raw.w13_scale[:, :: raw.intermediate_size, 0][:, :halves]
    return replace(raw, w13_scale=w13.contiguous(), w2_scale=raw.w2_scale[:, :1, 0].contiguous())


def _of_codes(case: Case, form: Form) -> moe.RawWeights:
    """Of random codes, scales and zero points."""
    given = make_raw(replace(case, scheme="none", dtype=torch.bfloat16))
    t, tensors = torch.Generator().manual_seed(case.seed), dict[str, Any]()
    low, high = (0, 16) if case.scheme == "int4" else (-127, 128)
    for name, dtype, points in zip(("w13", "w2"), form.dtypes, form.zero_points, strict=True):
        experts, rows, k = getattr(given, name).shape
        shape = (experts, rows, 1 if form.scales == "rows" else k // int(form.scales))
        codes = torch.randint(low, high, (experts, rows, k), generator=t)
        spread = (high - low) * math.sqrt(k / 12)
        tensors[f"{name}_scale"] = ((torch.rand(shape, generator=t) + 0.5) / spread).to(dtype)
        if points:
            zero = torch.randint(low, high, shape, generator=t)
            tensors[f"{name}_zero_point"] = zero.to(ZERO_POINT_DTYPES[case.scheme])
        tensors[name] = _in_words(codes) if case.scheme == "int4" else codes.to(torch.int8)
    kept = {n: getattr(given, n) for n in ("w13_bias", "w2_bias", "a13_input_scale", "a2_input_scale")}
    return moe.RawWeights(case.scheme, activation=case.activation, **tensors, **kept)


def _in_words(codes: Tensor) -> Tensor:
    words = (codes.unflatten(2, (-1, 8)) << torch.arange(0, 32, 4)).sum(3)
    return torch.where(words >= 2**31, words - 2**32, words).int()
