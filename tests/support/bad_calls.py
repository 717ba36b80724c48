"""Layers of which tests make wrong calls, and what these are told."""

from __future__ import annotations

import dataclasses

from problems import Case

NVFP4 = Case(act_format="nvfp4", input_scale="tensor", bias=True)
PLAIN = Case(scheme="none", hidden=40, inter=24, bias=True)
PER_EXPERT = dataclasses.replace(NVFP4, input_scale="expert")

ONE_SCALE = (
    "a1_gscale must have shape () where hidden_states are packed: they were quantized before an expert was known"
)
