"""Layers for `flashinfer_cutlass`, on a CPU that stands in for the device of each. Needs FlashInfer."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from flashinfer_sim import seam
from problems import Case, make_raw

import torch_moe_ops as moe
from torch_moe_ops.backends.flashinfer_cutlass import ACTIVATIONS

NAME = "flashinfer_cutlass"
BLACKWELL, HOPPER = (10, 0), (9, 0)
BASE = Case(tokens=5, experts=8, top_k=2, hidden=256, inter=128)
NVFP4 = dataclasses.replace(BASE, act_format="nvfp4", input_scale="tensor")
FP8 = dataclasses.replace(BASE, scheme="fp8", act_format="fp8", input_scale="tensor", inter=136)
CASES: dict[str, tuple[tuple[int, int], Case]] = {
    "bf16": (HOPPER, dataclasses.replace(BASE, scheme="none")),
    "f16 padded": (HOPPER, dataclasses.replace(BASE, scheme="none", hidden=100, inter=60, dtype=torch.float16)),
    "bf16 gpt-oss": (BLACKWELL, dataclasses.replace(BASE, scheme="none", activation="swigluoai", foreign=True)),
    "bf16 relu2": (BLACKWELL, dataclasses.replace(BASE, scheme="none", activation="relu2_no_mul")),
    "fp8": (HOPPER, FP8),
    "fp8_block": (HOPPER, dataclasses.replace(BASE, scheme="fp8_block", act_format="fp8", hidden=136, inter=152)),
    "nvfp4": (BLACKWELL, NVFP4),
    "nvfp4 padded": (BLACKWELL, dataclasses.replace(NVFP4, hidden=144, inter=176, foreign=True)),
    "nvfp4 relu2": (BLACKWELL, dataclasses.replace(NVFP4, activation="relu2_no_mul", inter=176)),
    "bf16 bias": (HOPPER, dataclasses.replace(BASE, scheme="none", bias=True, activation="swigluoai", hidden=136)),
    "fp8 bias": (HOPPER, dataclasses.replace(FP8, bias=True, activation="swigluoai")),
    "fp8_block gpt-oss": (
        HOPPER,
        dataclasses.replace(BASE, scheme="fp8_block", act_format="fp8", bias=True, activation="swigluoai", inter=152),
    ),
    "nvfp4 gpt-oss": (BLACKWELL, dataclasses.replace(NVFP4, bias=True, activation="swigluoai", inter=176)),
    **{
        f"{scheme} {activation}": (BLACKWELL, dataclasses.replace(case, activation=activation, bias=True, inter=96))
        for scheme, case in (("bf16", dataclasses.replace(BASE, scheme="none")), ("nvfp4", NVFP4))
        for activation in ACTIVATIONS["none"]
    },
    "mxfp4 mxfp8": (BLACKWELL, dataclasses.replace(BASE, scheme="mxfp4", act_format="mxfp8", inter=96)),
    "mxfp8": (BLACKWELL, dataclasses.replace(BASE, scheme="mxfp8", act_format="mxfp8", bias=True, inter=96)),
    "mxfp4 gpt-oss": (
        BLACKWELL,
        dataclasses.replace(BASE, scheme="mxfp4", act_format="mxfp8", bias=True, activation="swigluoai", hidden=96),
    ),
}


def raw_of(case: Case) -> moe.RawWeights:
    """Biases that bfloat16 holds, which the kernels take; one scale of fp8 weights a matrix."""
    raw = make_raw(case)
    if case.bias:
        biases = {name: getattr(raw, name).bfloat16() for name in ("w13_bias", "w2_bias")}
        raw = dataclasses.replace(raw, **biases)
    if case.scheme != "fp8":
        return raw
    fields: dict[str, torch.Tensor] = {}
    for name, dense in zip(("w13", "w2"), moe.dequantize_experts(raw), strict=True):
        scale = dense.abs().amax((1, 2), keepdim=True).float() / 448
        fields[name] = (dense.float() / scale).to(torch.float8_e4m3fn)
        fields[f"{name}_scale"] = scale[:, :, 0]
    return dataclasses.replace(raw, **fields)


def use(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> list[dict[str, Any]]:
    seam.allow_cpu(monkeypatch, NAME, capability)
    return seam.install_cutlass(monkeypatch, capability)
