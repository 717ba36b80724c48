"""What neighbours of the right argument are told: which argument, what it must be, and what to do instead."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from bad_calls import ONE_SCALE, PLAIN
from problems import Case, make_batch, make_raw
from samples import overload, packed_sample, routed_sample

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.core.schemas import arguments


@pytest.mark.parametrize("routing", ["renormalize", None, {"method": "renormalize", "top_k": 2}])
def test_a_routing_of_another_type(routing: Any) -> None:
    raw = make_raw(PLAIN)
    x, logits = torch.randn(5, 40).bfloat16(), torch.randn(5, 4)
    with pytest.raises(TypeError, match=r"^fused_moe: routing must be a Routing \(.*\), got "):
        moe.fused_moe(x, logits, moe.prepare(raw), routing=routing)
    with pytest.raises(TypeError, match=r"^route: routing must be a Routing"):
        moe.route(logits, routing)


def test_raw_weights_in_the_place_of_prepared_ones() -> None:
    raw = make_raw(PLAIN)
    x, ids, weights = make_batch(PLAIN)
    text = r"w must be PreparedWeights \(prepare makes them of RawWeights\), got RawWeights"
    with pytest.raises(TypeError, match=f"^fused_moe: {text}"):
        moe.fused_moe(x, torch.randn(5, 4), raw, routing=moe.Routing("renormalize", 2))
    with pytest.raises(TypeError, match=f"^fused_moe_routed: {text}"):
        moe.fused_moe_routed(x, ids, weights, raw)
    with pytest.raises(TypeError, match=r"^fused_moe_routed: w must be PreparedWeights, got NoneType"):
        moe.fused_moe_routed(x, ids, weights, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool])
def test_ids_of_another_dtype(dtype: torch.dtype) -> None:
    w = moe.prepare(make_raw(PLAIN))
    x, ids, weights = make_batch(PLAIN)
    expected = moe.fused_moe_routed(x, ids, weights, w)
    assert torch.equal(moe.fused_moe_routed(x, ids.long(), weights.double(), w), expected)
    text = r"topk_ids must have dtype torch\.int32 \(fused_moe_routed also takes torch\.int64\), got torch"
    with pytest.raises(RuntimeError, match=text):
        moe.fused_moe_routed(x, ids.to(dtype), weights, w)
    with pytest.raises(RuntimeError, match="topk_ids must be a Tensor, got None"):
        moe.fused_moe_routed(x, None, weights, w)
    with pytest.raises(RuntimeError, match="topk_weights must be a Tensor, got None"):
        moe.fused_moe_routed(x, ids, None, w)


@pytest.mark.parametrize("value", [1e300, 3.5e38, 1e-300])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_constants_that_float32_does_not_hold(value: float, backend: str) -> None:
    args, keywords = routed_sample(PLAIN, backend)
    text = (
        "swiglu_limit must be at (most 3.4e38 in magnitude, the range of float32|least 1.4e-45, as float32 has it), got"
    )
    with pytest.raises(RuntimeError, match=f"^moeq::moe_routed: {text}"):
        torch.ops.moeq.moe_routed(*args, **keywords, swiglu_limit=value)
    with pytest.raises(ValueError, match=text):
        moe.prepare(make_raw(PLAIN), backend=backend, swiglu_limit=value)
    torch.ops.moeq.moe_routed(*args, **keywords, swiglu_limit=3.4e38)
    torch.ops.moeq.moe_routed(*args, **keywords, swiglu_limit=float("inf"))


def test_a_scaling_factor_that_float32_does_not_hold() -> None:
    with pytest.raises(ValueError, match=r"routed_scaling_factor must be at most 3\.4e38"):
        moe.Routing("deepseek_v3", 2, routed_scaling_factor=1e39)
    with pytest.raises(RuntimeError, match=r"moeq::route: routed_scaling_factor must be at most 3\.4e38"):
        torch.ops.moeq.route(torch.randn(2, 8), None, "default", 2, 0, 0, -1e300)


@pytest.mark.parametrize("scheme", ["fp8", "int8", "mxfp4"])
def test_packed_rows_with_a_scale_for_each_expert(scheme: str) -> None:
    """The rows were quantized before an expert was known; the message says so, and what to do."""
    act = {"mxfp4": "fp8"}.get(scheme, scheme)
    case = Case(scheme=scheme, act_format=act, hidden=96, inter=64)
    args, keywords = packed_sample(case, "reference")
    names, _ = arguments(f"{scheme}_moe_routed")
    at = names.index("a1_gscale")
    text = re.escape(ONE_SCALE)
    with pytest.raises(RuntimeError, match=rf"{text}.*pass unquantized hidden_states, or prepare with.*got \(4,\)"):
        overload(f"{scheme}_moe_routed")(*args[:at], torch.ones(4), *args[at + 1 :], **keywords)


@pytest.mark.parametrize("name", ["w13_bias", "w2_bias"])
def test_biases_of_float64(name: str) -> None:
    raw = make_raw(PLAIN)
    with pytest.raises(
        ValueError, match=rf"RawWeights: {name} must have one of the dtypes .*float32.*, got torch.float64"
    ):
        dataclasses.replace(raw, **{name: getattr(raw, name).double()})


def test_hidden_states_of_another_size_on_a_layout_that_does_not_show_its_own() -> None:
    w = moe.prepare(make_raw(Case()), act_format="none")
    if w.backend == "reference":
        pytest.skip("the CPU kernels are not compiled; the linear layout tells the right size")
    x, ids, weights = make_batch(dataclasses.replace(Case(), hidden=32))
    text = (
        rf"w13 must have shape .* in layout {BACKENDS[w.backend].layout.name} for hidden_states of hidden_size 32, got"
    )
    with pytest.raises(RuntimeError, match=text):
        moe.fused_moe_routed(x, ids, weights, w)
