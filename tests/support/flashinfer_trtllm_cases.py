"""Layers for `flashinfer_trtllm`, each beside the same one for the oracle."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from problems import Case, make_raw

import torch_moe_ops as moe

NAME = "flashinfer_trtllm"


def reason(raw: moe.RawWeights, act_format: str) -> str:
    against = moe.explain(raw, act_format=act_format).against[NAME]
    return "; ".join(against)


@dataclasses.dataclass(frozen=True)
class ChannelCase(Case):
    """fp8 weights with one scale a row, as quantize_experts makes them."""


BASE = Case(tokens=5, experts=8, top_k=2, hidden=256, inter=128)
NVFP4 = dataclasses.replace(BASE, act_format="nvfp4", input_scale="tensor")
CHANNEL = ChannelCase(scheme="fp8", act_format="fp8", tokens=5, experts=8, top_k=2, hidden=136, inter=144, foreign=True)
CASES = {
    "nvfp4": NVFP4,
    "nvfp4 half alphas": dataclasses.replace(NVFP4, per_half=True, bias=True),
    "nvfp4 bias": dataclasses.replace(NVFP4, bias=True, hidden=144, inter=176),
    "nvfp4 relu2": dataclasses.replace(NVFP4, activation="relu2_no_mul", inter=176, bias=True),
    "nvfp4 gelu": dataclasses.replace(NVFP4, activation="gelu"),
    "nvfp4 identity": dataclasses.replace(NVFP4, activation="identity_no_mul"),
    "nvfp4 gpt-oss": dataclasses.replace(NVFP4, activation="swigluoai", bias=True, inter=176),
    "nvfp4 dynamic": dataclasses.replace(NVFP4, input_scale="none"),
    "nvfp4 dynamic half alphas": dataclasses.replace(NVFP4, input_scale="none", per_half=True, inter=176),
    "nvfp4 dynamic relu2": dataclasses.replace(NVFP4, input_scale="none", activation="relu2_no_mul", hidden=272),
    "nvfp4 swiglustep": dataclasses.replace(NVFP4, activation="swiglustep"),
    "nvfp4 padded": dataclasses.replace(NVFP4, hidden=272, inter=144, foreign=True, dtype=torch.float16),
    "mxfp4": dataclasses.replace(BASE, scheme="mxfp4"),
    "mxfp4 gpt-oss": dataclasses.replace(BASE, scheme="mxfp4", activation="swigluoai", bias=True, hidden=96, inter=160),
    "mxfp4 mxfp8": dataclasses.replace(BASE, scheme="mxfp4", act_format="mxfp8", bias=True, inter=96),
    "mxfp4 mxfp8 gelu": dataclasses.replace(BASE, scheme="mxfp4", act_format="mxfp8", activation="gelu"),
    "mxfp4 mxfp8 relu2": dataclasses.replace(
        BASE, scheme="mxfp4", act_format="mxfp8", activation="relu2_no_mul", inter=96, bias=True
    ),
    "mxfp8": dataclasses.replace(BASE, scheme="mxfp8", act_format="mxfp8", inter=96, hidden=288),
    "mxfp8 gpt-oss": dataclasses.replace(BASE, scheme="mxfp8", act_format="mxfp8", activation="swigluoai"),
    "mxfp8 swiglustep": dataclasses.replace(BASE, scheme="mxfp8", act_format="mxfp8", activation="swiglustep"),
    "mxfp8 relu2": dataclasses.replace(BASE, scheme="mxfp8", act_format="mxfp8", activation="relu2_no_mul"),
    "mxint4": dataclasses.replace(BASE, scheme="mxint4", inter=256, foreign=True),
    "mxint4 padded": dataclasses.replace(BASE, scheme="mxint4", hidden=160, inter=96),
    "fp8": dataclasses.replace(BASE, scheme="fp8", act_format="fp8", input_scale="tensor", hidden=136, inter=144),
    "fp8 relu2": dataclasses.replace(
        BASE, scheme="fp8", act_format="fp8", input_scale="tensor", activation="relu2_no_mul"
    ),
    "fp8 swiglustep": dataclasses.replace(
        BASE, scheme="fp8", act_format="fp8", input_scale="tensor", activation="swiglustep", hidden=136
    ),
    "fp8 dynamic": dataclasses.replace(BASE, scheme="fp8", act_format="fp8", hidden=136, inter=144),
    "fp8 channel": CHANNEL,
    "fp8 channel relu2": dataclasses.replace(CHANNEL, activation="relu2_no_mul"),
    "fp8_block gpt-oss": dataclasses.replace(
        BASE, scheme="fp8_block", act_format="fp8", activation="swigluoai", hidden=384, inter=256
    ),
    "fp8_block": dataclasses.replace(BASE, scheme="fp8_block", act_format="fp8", hidden=384, inter=256),
    "fp8_block padded": dataclasses.replace(BASE, scheme="fp8_block", act_format="fp8", hidden=136, inter=152),
    "none": dataclasses.replace(BASE, scheme="none"),
    "none gpt-oss": dataclasses.replace(BASE, scheme="none", activation="swigluoai", hidden=144, inter=72),
    "none swiglustep": dataclasses.replace(BASE, scheme="none", activation="swiglustep", inter=72),
    "none relu2": dataclasses.replace(BASE, scheme="none", activation="relu2_no_mul", foreign=True),
}


def raw_of(case: Case) -> moe.RawWeights:
    """quantize_experts gives fp8 weights one scale a row; here most have one a matrix or half."""
    raw = make_raw(case)
    if case.scheme != "fp8" or isinstance(case, ChannelCase):
        return raw
    fields: dict[str, torch.Tensor] = {}
    halves = 1 if case.activation == "swiglustep" or not raw.is_gated else 2
    for name, dense, parts in zip(("w13", "w2"), moe.dequantize_experts(raw), (halves, 1), strict=True):
        wide = dense.float().unflatten(1, (parts, -1))
        scale = wide.abs().amax((2, 3)) / 448
        fields[name] = (wide / scale[..., None, None]).flatten(1, 2).to(torch.float8_e4m3fn)
        fields[f"{name}_scale"] = scale
    return dataclasses.replace(raw, **fields)


def layers(case: Case) -> tuple[moe.PreparedWeights, moe.PreparedWeights]:
    raw = raw_of(case)
    why = reason(raw, case.act_format)
    if "flashinfer must have" in why or "which flashinfer" in why or "needs flashinfer-python" in why:
        pytest.skip(why)
    return tuple(moe.prepare(raw, act_format=case.act_format, backend=b) for b in (NAME, "reference"))


def distinct_logits(tokens: int, experts: int) -> torch.Tensor:
    """Without ties, exact in bfloat16, of both signs."""
    rows = [torch.randperm(experts) for _ in range(tokens)]
    return (torch.stack(rows) - experts // 2) / 16
