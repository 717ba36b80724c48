"""The `triton_fp8` backend: e4m3 codes multiplied as they are. On the GPU where there is one, else interpreted."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton_cases import DEVICE, empty_output, error_over_bound, make_call, packed_input, relative_error

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.backends.triton_engine import launch
from torch_moe_ops.backends.triton_engine.configs import Config, Tile
from torch_moe_ops.core.call import ExpertsCall

runs = pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or TRITON_INTERPRET=1"
)
NAME = "triton_fp8"
SCHEMES = ("fp8", "fp8_block")
TILES = Config(32, 16, Tile(64, 64, 4, 3), Tile(64, 128, 4, 3, split_k=2))
PROBLEM = moe.Problem(
    "fp8_block", "fp8", device="cuda", capability=(9, 0), num_experts=8, hidden_size=256, intermediate_size=256
)


def call_of(scheme: str, **fields: Any) -> ExpertsCall:
    return make_call(scheme, "fp8", backend=NAME, out_dtype=torch.float32, **fields)


def run(call: ExpertsCall, config: Config | None = None) -> torch.Tensor:
    out = empty_output(call)
    launch.run_experts(call, out, config)
    return out


def check(call: ExpertsCall, config: Config | None = None) -> None:
    out = run(call, config)
    error = relative_error(out, call)
    print(f"{call.scheme} {call.w2.shape[1]} {error:.2e}")
    assert error_over_bound(out, call) < 1
    assert DEVICE == "cuda" or error < 1e-5  # the interpreter sums in float32


@runs
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("hidden", "inter"), ((208, 176), (128, 256), (264, 40)))
@pytest.mark.parametrize("activation", ("silu", "relu2_no_mul"))
def test_sizes(scheme: str, hidden: int, inter: int, activation: str) -> None:
    check(call_of(scheme, hidden=hidden, inter=inter, activation=activation, bias=True))


@runs
@pytest.mark.parametrize("scheme", SCHEMES)
def test_tiles_and_parts(scheme: str) -> None:
    call = call_of(scheme, tokens=20, hidden=288, inter=160, foreign=True)
    check(call._replace(topk_weights=call.topk_weights.nan_to_num(1.0)), TILES)
    check(call_of(scheme, tokens=1, top_k=4, hidden=288, inter=160), TILES)


@runs
@pytest.mark.parametrize(
    ("a1", "a2", "scales"),
    ((90.0, 30.0, "channel"), ("expert", "expert", "half"), (None, 30.0, "tensor"), ("expert", None, "channel")),
)
def test_scales(a1: Any, a2: Any, scales: str) -> None:
    check(call_of("fp8", a1=a1, a2=a2, weights={"scales": scales}))


@runs
@pytest.mark.parametrize("scheme", SCHEMES)
def test_float16_and_router_weight(scheme: str) -> None:
    check(call_of(scheme, dtype=torch.float16))
    check(call_of(scheme, top_k=1, router_weight_on_input=True))


@runs
@pytest.mark.parametrize("scheme", SCHEMES)
def test_packed_hidden_states_are_read_as_they_are(scheme: str) -> None:
    call = call_of(scheme, tokens=6, hidden=160, inter=96)
    assert torch.equal(run(packed_input(call)), run(call))


@runs
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_nan_row_disturbs_no_other(scheme: str) -> None:
    call = call_of(scheme, tokens=6)
    clean = run(call)
    call.hidden_states[3] = float("nan")
    assert torch.equal(run(call)[[0, 1, 2, 4, 5]], clean[[0, 1, 2, 4, 5]])


def test_only_where_accuracy_is_not_strict() -> None:
    strict = dataclasses.replace(PROBLEM, accuracy="strict")
    assert BACKENDS[NAME].fits_anywhere(PROBLEM) and not BACKENDS[NAME].fits_anywhere(strict)
    assert moe.explain(strict).chosen != NAME
    assert "14 bits" in moe.explain(PROBLEM).notes[NAME]


@pytest.mark.parametrize(
    ("change", "text"),
    (
        ({"capability": (8, 6)}, "(8, 9)"),
        ({"act_format": "none"}, "'none'"),
        ({"scheme": "mxfp8", "act_format": "mxfp8"}, "'mxfp8'"),
        ({"dtype": torch.float32}, "float32"),
    ),
)
def test_reasons(change: dict[str, Any], text: str) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1" and "capability" in change:
        pytest.skip("the interpreter runs anywhere")
    assert any(text in reason for reason in BACKENDS[NAME].reasons(dataclasses.replace(PROBLEM, **change)))
