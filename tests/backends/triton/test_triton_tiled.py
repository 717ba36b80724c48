"""Few tokens of the `cuda_sm90_fp8` backend by the Triton engine, which reads its tiles. Interpreted without a GPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from sm90_cases import fp8_in_tiles
from triton_cases import DEVICE, error_over_bound, make_call, packed_input, relative_error

from torch_moe_ops.backends.triton_engine import launch
from torch_moe_ops.backends.triton_engine.configs import Config, Tile
from torch_moe_ops.core.call import ExpertsCall

pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or TRITON_INTERPRET=1"
)
schemes = pytest.mark.parametrize("scheme", ("fp8", "fp8_block"))
TILES = Config(32, 16, Tile(64, 64, 4, 3), Tile(64, 128, 4, 3, split_k=2))


def call_of(scheme: str, **fields: Any) -> ExpertsCall:
    usual: dict[str, Any] = {"hidden": 256, "inter": 128, "seed": 1, "out_dtype": torch.float32}
    return make_call(scheme, "fp8", **usual | fields)


def run(call: ExpertsCall, config: Config | None = None) -> torch.Tensor:
    """Of a call with weights in tiles, from a buffer full of NaN."""
    shape = (call.topk_ids.shape[0], call.hidden_states.shape[1])
    out = torch.full(shape, float("nan"), dtype=call.out_dtype, device=call.w2.device)
    launch.run_experts(call, out, config)
    return out


def check(call: ExpertsCall, config: Config | None = None) -> None:
    out = run(fp8_in_tiles(call), config)
    error = relative_error(out, call)
    print(f"{call.scheme} {call.w2.shape[1]} {error:.2e}")
    assert error_over_bound(out, call) < 1
    assert DEVICE == "cuda" or error < 1e-5  # the interpreter sums in float32


@schemes
@pytest.mark.parametrize(("hidden", "inter"), ((128, 256), (384, 40)))
@pytest.mark.parametrize("activation", ("silu", "relu2_no_mul"))
def test_sizes(scheme: str, hidden: int, inter: int, activation: str) -> None:
    check(call_of(scheme, hidden=hidden, inter=inter, activation=activation, bias=True))


@schemes
def test_tiles_and_parts(scheme: str) -> None:
    call = call_of(scheme, tokens=20, hidden=384, inter=160, foreign=True)
    check(call._replace(topk_weights=call.topk_weights.nan_to_num(1.0)), TILES)
    check(call_of(scheme, tokens=1, top_k=4, hidden=256, inter=384), TILES)


@pytest.mark.parametrize(
    ("a1", "a2", "scales"),
    ((90.0, 30.0, "channel"), ("expert", "expert", "half"), (None, 30.0, "tensor"), ("expert", None, "channel")),
)
def test_scales(a1: Any, a2: Any, scales: str) -> None:
    check(call_of("fp8", a1=a1, a2=a2, weights={"scales": scales}))


@schemes
def test_one_token(scheme: str) -> None:
    check(call_of(scheme, tokens=1, top_k=3, inter=384, bias=True))


@schemes
def test_router_weight(scheme: str) -> None:
    check(call_of(scheme, top_k=1, router_weight_on_input=True))


@schemes
def test_packed_hidden_states(scheme: str) -> None:
    call = call_of(scheme, tokens=6)
    assert torch.equal(run(fp8_in_tiles(packed_input(call))), run(fp8_in_tiles(call)))


@schemes
def test_a_nan_row_disturbs_no_other(scheme: str) -> None:
    call = fp8_in_tiles(call_of(scheme, tokens=6))
    clean = run(call)
    call.hidden_states[3] = float("nan")
    assert torch.equal(run(call)[[0, 1, 2, 4, 5]], clean[[0, 1, 2, 4, 5]])
