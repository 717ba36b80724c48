"""What `auto` takes on Hopper by the measurements that the library came with."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from installed_backends import install_everything

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.backends.measured import distance, records
from torch_moe_ops.core.activations import ACTIVATIONS

INT4 = moe.Problem("int4", device="cuda", capability=(9, 0), num_experts=160, hidden_size=5120, intermediate_size=1536)


@pytest.fixture(autouse=True)
def everything_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    install_everything(monkeypatch)


def posed_with(activation: str, **fields: Any) -> moe.Problem:
    constants = ACTIVATIONS[activation].constants
    own = None if constants == ACTIVATIONS["silu"].constants else constants
    return dataclasses.replace(INT4, activation=activation, constants=own, **fields)


@pytest.mark.parametrize("activation", ["swigluoai", "gelu_tanh", "relu2_no_mul"])
@pytest.mark.parametrize("scheme", ["int4", "fp8", "fp8_block"])
def test_activations_of_known_models(scheme: str, activation: str) -> None:
    """gpt-oss', Gemma's and Nemotron's, as `prepare` poses them."""
    act_format = "none" if scheme == "int4" else "fp8"
    scales = {"int4": "bfloat16 per 32", "fp8": "channel", "fp8_block": None}[scheme]
    posed = posed_with(activation, scheme=scheme, act_format=act_format, weight_scales=scales)
    assert moe.explain(posed).chosen == ("cuda_sm90_int4" if scheme == "int4" else "cuda_sm90_fp8")


ALL_INT4 = [
    f"{dtype} {groups}{points}"
    for dtype in ("bfloat16", "float16", "float32")
    for groups in ("per 128", "per 64", "per 32")
    for points in ("", " with zero points")
]


@pytest.mark.parametrize("act_format", ("none", "fp8"))
@pytest.mark.parametrize("kind", ALL_INT4)
@pytest.mark.parametrize("activation", ("silu", "swigluoai", "gelu", "gelu_tanh", "relu2_no_mul", "situ", "swiglustep"))
def test_forms_of_int4(kind: str, act_format: str, activation: str) -> None:
    """Each form of the scales on a layer that was not timed; float32 ones in groups of 32 are `triton`'s alone."""
    posed = posed_with(activation, act_format=act_format, weight_scales=kind)
    assert moe.explain(posed).chosen == ("triton" if kind.startswith("float32 per 32") else "cuda_sm90_int4")
    assert moe.explain(dataclasses.replace(posed, accuracy="strict")).chosen == "triton"


def test_what_is_near_enough_was_timed() -> None:
    """Else the default leaves it to a slower backend, whatever was measured of its distance."""
    data = records.measured()
    timed = [(r["scheme"], r["act_format"], r["weight_scales"]) for r in data["times"]]
    for entry in data["distances"]:
        strict = BACKENDS[entry["backend"]].accuracy == "strict"
        if strict or entry["ratio"] is None or entry["ratio"] > distance.FACTOR:
            continue
        kinds = {(entry["scheme"], entry["act_format"], scales) for scales in (None, entry["weight_scales"])}
        layers = sum(kind in kinds for kind in timed)
        assert layers >= records.MIN_LAYERS, (entry["backend"], entry["scheme"], entry["weight_scales"])


@pytest.mark.parametrize("activation", ("relu2", "silu_no_mul", "gelu_no_mul", "identity_no_mul"))
@pytest.mark.parametrize("act_format", ("none", "fp8"))
def test_forms_of_int4_that_are_not_measured(act_format: str, activation: str) -> None:
    """As docs/numerics.md has it."""
    for kind in ("bfloat16 per 128", "bfloat16 per 32"):
        assert moe.explain(posed_with(activation, act_format=act_format, weight_scales=kind)).chosen == "cuda_sm90_int4"
    others = [f"{dtype} per 128" for dtype in ("float16", "float32")]
    others += ["bfloat16 per 64"] * (act_format == "fp8")  # beside 16 bits they count as groups of 128
    for kind in ("bfloat16 per 128 with zero points", "float16 per 32", *others):
        assert moe.explain(posed_with(activation, act_format=act_format, weight_scales=kind)).chosen == "triton"


@pytest.mark.parametrize("act_format", ("none", "fp8"))
@pytest.mark.parametrize(
    ("kind", "chosen"),
    [
        ("bfloat16 per row", "cuda_sm90_int4"),
        ("float16 per row", "cuda_sm90_int4"),
        ("float16 per row with zero points", "triton"),
        ("float32 per row", "triton"),
    ],
)
def test_scales_of_rows_of_int4(act_format: str, kind: str, chosen: str) -> None:
    """`triton` has another kernel for them than for groups: what was not timed is left to it."""
    assert moe.explain(dataclasses.replace(INT4, act_format=act_format, weight_scales=kind)).chosen == chosen


@pytest.mark.parametrize("scheme", ["int4", "fp8", "fp8_block"])
def test_silu_with_a_limit(scheme: str) -> None:
    """DeepSeek-V4's 10, and what is nearer than 0.25, the least one that was measured."""
    act_format, scales = ("none", "bfloat16 per 128") if scheme == "int4" else ("fp8", None)
    fast, exact = ("cuda_sm90_int4", "triton") if scheme == "int4" else ("cuda_sm90_fp8", "cuda_sm90")
    fields = {"act_format": act_format, "weight_scales": "channel" if scheme == "fp8" else scales}
    for limit, chosen in ((10.0, fast), (0.25, fast), (0.2, exact)):
        posed = dataclasses.replace(INT4, scheme=scheme, constants=(1.0, 0.0, limit), **fields)
        assert moe.explain(posed).chosen == chosen, limit


def test_two_matrices_scales_that_are_stored_alike_are_one_kind() -> None:
    posed = dataclasses.replace(INT4, weight_scales="float16 per 128, float16 per 64")
    assert "in the worst row of scales float16 per 128: at most" in distance.statement("cuda_sm90_int4", posed)
    assert moe.explain(posed).chosen == "cuda_sm90_int4"
    other = dataclasses.replace(INT4, weight_scales="float16 per 128, bfloat16 per 64")
    assert moe.explain(other).chosen == "triton"
    beside_fp8 = dataclasses.replace(posed, act_format="fp8")
    assert moe.explain(beside_fp8).chosen == "triton"
