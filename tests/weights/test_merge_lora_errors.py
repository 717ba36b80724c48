"""What merge_lora refuses, naming the argument, what it must be and what came."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from lora_cases import LAYERS, adapters, plain

import torch_moe_ops as moe

SCALING = 0.5


def refused(raw: moe.RawWeights) -> dict[str, tuple[dict[str, Any], type[Exception], str]]:
    """name -> arguments, and the error that must name them."""
    f = adapters(raw)
    a13, b13, a2, b2 = (f[name] for name in ("a13", "b13", "a2", "b2"))
    nan, huge = b13.clone(), torch.full_like(a2, 3e38)
    nan[1, 2, 3] = torch.nan
    return {
        "nothing": ({}, ValueError, "a13 and b13, or a2 and b2, must be given, got none"),
        "a13 alone": ({"a13": a13}, ValueError, "a13 and b13 must be given together, got a13 without b13"),
        "b2 alone": ({"b2": b2}, ValueError, "a2 and b2 must be given together, got b2 without a2"),
        "swapped": ({"a13": b13, "b13": a13}, ValueError, r"a13 must have shape \(3, 4?(256)?, 256\), .*got \(3, 256, 4\)"),
        "experts": ({"a13": a13[:2], "b13": b13}, ValueError, r"a13 must have shape \(3, 4, 256\), .*got \(2, 4, 256\)"),
        "rank": ({"a2": a2, "b2": b2[..., :3]}, ValueError, r"b2 must have shape \(3, 256, 4\), .*got \(3, 256, 3\)"),
        "no rank": ({"a2": a2[:, :0], "b2": b2[..., :0]}, ValueError, r"a2 must have shape \(3, r, 128\), r at least 1"),
        "2-D": ({"a2": a2[0], "b2": b2}, ValueError, r"a2 must have shape \(3, r, 128\)"),
        "list": ({"a2": a2.tolist(), "b2": b2}, TypeError, "a2 must be a Tensor, got list"),
        "dtype": ({"a2": a2.double(), "b2": b2}, TypeError, "a2 must have a dtype of .* got torch.float64"),
        "device": ({"a2": a2.to("meta"), "b2": b2}, ValueError, "a2 must be on cpu like w13, got meta"),
        "nan": ({"a13": a13, "b13": nan}, ValueError, r"b13 must be finite, got nan at \[1, 2, 3\]"),
        "sum": ({"a2": huge, "b2": torch.full_like(b2, 3e38)}, ValueError, "merged w2 of expert 0 must be finite, got inf"),
        "scaling": ({"a2": a2, "b2": b2, "scaling": torch.inf}, ValueError, "scaling must be a finite number, got inf"),
        "scaling's type": ({"a2": a2, "b2": b2, "scaling": True}, ValueError, "scaling must be a finite number, got True"),
        "raw": ({"raw": {}, "a2": a2, "b2": b2}, TypeError, "raw must be RawWeights, got dict"),
    }  # fmt: skip


@pytest.mark.parametrize("name", refused(plain("nvfp4")))
def test_what_is_refused(name: str) -> None:
    raw = plain("nvfp4")
    arguments, error, text = refused(raw)[name]
    with pytest.raises(error, match=f"merge_lora: {text}"):
        moe.merge_lora(**{"raw": raw, "scaling": SCALING, **arguments})


def test_a_sum_that_its_dtype_does_not_have_is_refused() -> None:
    """70000 is no float16, neither as a weight nor as a scale of one."""
    raw = plain("none")
    raw = dataclasses.replace(raw, w13=raw.w13.half(), w2=raw.w2.half())
    factors = {"a2": torch.ones(3, 1, raw.intermediate_size), "b2": torch.ones(3, raw.hidden_size, 1)}
    with pytest.raises(ValueError, match=r"w2 of merged expert 0 in torch.float16 must be finite, got inf"):
        moe.merge_lora(raw, **factors, scaling=7e4)
    with pytest.raises(ValueError, match=r"w2_scale of merged expert 0 in torch.float16 must be finite, got inf"):
        moe.merge_lora(LAYERS["int4 rows"](), **factors, scaling=7e5)
