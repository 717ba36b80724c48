"""The Triton engine against the oracle: on the GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton_cases import DEVICE, empty_output, make_call, packed_input, relative_error

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.backends import triton as backend
from torch_moe_ops.backends.triton_engine import launch, schedule
from torch_moe_ops.backends.triton_engine.configs import Config, Tile
from torch_moe_ops.backends.triton_engine.plan import make_plan
from torch_moe_ops.core.call import ExpertsCall

pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or TRITON_INTERPRET=1"
)

# Codes and block scales are exact; what is left is the order of float32 sums, which rounds the output differently.
LIMIT = 2e-3
ACTIVATIONS = (
    "silu", "gelu", "gelu_tanh", "relu2", "swigluoai", "swiglustep", "situ",
    "silu_no_mul", "gelu_no_mul", "relu2_no_mul", "identity_no_mul",
)  # fmt: skip


def run(call: ExpertsCall, config: Config | None = None) -> torch.Tensor:
    out = empty_output(call)
    if config is None:
        backend.run(call, out)
    else:
        launch.run_experts(call, out, config)
    return out


def check(call: ExpertsCall, config: Config | None = None, limit: float = LIMIT) -> None:
    out = run(call, config)
    assert torch.isfinite(out).all()
    assert relative_error(out, call) < limit


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("scheme", ("nvfp4", "none"))
@pytest.mark.parametrize(("hidden", "inter"), ((80, 48), (128, 64), (176, 208), (256, 16)))
def test_sizes(scheme: str, dtype: torch.dtype, hidden: int, inter: int) -> None:
    check(make_call(scheme, dtype=dtype, hidden=hidden, inter=inter))


@pytest.mark.parametrize(
    ("a1", "a2"), ((500.0, 300.0), ("expert", "expert"), (None, None), (None, 300.0), ("expert", None))
)
@pytest.mark.parametrize(("hidden", "inter"), ((80, 48), (192, 144)))
def test_nvfp4_activations(a1: Any, a2: Any, hidden: int, inter: int) -> None:
    check(make_call("nvfp4", "nvfp4", a1=a1, a2=a2, hidden=hidden, inter=inter, seed=1))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("act_format", "bias"), (("none", True), ("nvfp4", False)))
def test_activations(activation: str, act_format: str, bias: bool) -> None:
    quantized: dict[str, Any] = {"a1": 500.0, "a2": 300.0} if act_format == "nvfp4" else {}
    check(make_call("nvfp4", act_format, activation=activation, bias=bias, **quantized))


def test_silu_with_limit() -> None:
    call = make_call("none", activation="silu", constants=(None, None, 0.5))
    check(call)
    assert relative_error(run(call._replace(swiglu_limit=float("inf"))), call) > 0.05


@pytest.mark.parametrize("scheme", ("nvfp4", "none"))
def test_bias_without_gate(scheme: str) -> None:
    check(make_call(scheme, activation="relu2_no_mul", bias=True, dtype=torch.float16))


@pytest.mark.parametrize("per_half", (True, False))
def test_alphas_of_gate_and_up(per_half: bool) -> None:
    check(make_call("nvfp4", per_half=per_half))


@pytest.mark.parametrize("act_format", ("none", "nvfp4"))
def test_foreign_ids_contribute_nothing(act_format: str) -> None:
    call = make_call("nvfp4", act_format, tokens=9, foreign=True, a1="expert" if act_format == "nvfp4" else None)
    out = run(call)
    assert relative_error(out, call._replace(topk_weights=call.topk_weights.nan_to_num(1.0))) < LIMIT
    assert not out[-1].any()  # every expert of the last token is foreign


@pytest.mark.parametrize("extreme", (-(2**31), 2**31 - 1, -1))
def test_extreme_ids_are_foreign(extreme: int) -> None:
    call = make_call("none", foreign=True)
    call.topk_ids[:, 0] = extreme
    weights = call.topk_weights.nan_to_num(1.0)
    assert relative_error(run(call), call._replace(topk_weights=weights)) < LIMIT


def test_duplicate_ids_add() -> None:
    call = make_call("nvfp4", top_k=3)
    call.topk_ids[:] = 2
    check(call)


@pytest.mark.parametrize("scheme", ("nvfp4", "none"))
def test_router_weight_on_input(scheme: str) -> None:
    check(make_call(scheme, top_k=1, router_weight_on_input=True))


def test_router_weight_on_quantized_input() -> None:
    check(make_call("nvfp4", "nvfp4", a1=None, a2=300.0, top_k=1, router_weight_on_input=True))


def test_packed_hidden_states() -> None:
    call = make_call("nvfp4", "nvfp4", a1=500.0, a2=300.0)
    assert torch.equal(run(packed_input(call)), run(call))


@pytest.mark.parametrize("out_dtype", (torch.float16, torch.float32))
def test_output_dtype(out_dtype: torch.dtype) -> None:
    check(make_call("nvfp4", "nvfp4", a1=500.0, a2=300.0, out_dtype=out_dtype))


@pytest.mark.parametrize("a1", (500.0, "expert", None))
def test_one_token(a1: Any) -> None:
    """No schedule is made for one token; duplicates and foreign ids still count right."""
    call = make_call("nvfp4", "nvfp4", tokens=1, top_k=4, a1=a1, a2=None if a1 is None else 300.0)
    call.topk_ids[0, 1] = call.topk_ids[0, 0]
    check(call)
    call.topk_ids[0, 2] = -1
    check(call)
    check(make_call("none", tokens=1))
    check(
        make_call("nvfp4", tokens=1, hidden=272, inter=144), Config(16, 16, Tile(128, 128, 4, 3), Tile(64, 128, 4, 3))
    )


def test_no_tokens() -> None:
    call = make_call("nvfp4", tokens=0)
    assert run(call).shape == (0, 80)


@pytest.mark.parametrize("block_t", (8, 16, 64))
@pytest.mark.parametrize("tile", (Tile(64, 128, 4, 3), Tile(128, 256, 8, 2)))
def test_every_tile_gives_the_same(block_t: int, tile: Tile) -> None:
    """Several tiles of tokens an expert, and an expert without any."""
    call = make_call("nvfp4", tokens=30, top_k=2, hidden=272, inter=144)
    call.topk_ids[call.topk_ids == 1] = 2
    check(call, Config(block_t, min(block_t, 16), tile, tile))


@pytest.mark.parametrize("activation", ("silu", "relu2_no_mul"))
@pytest.mark.parametrize("tile", (Tile(64, 64, 4, 3), Tile(128, 64, 4, 3)))
def test_many_tokens_a_tile_of_plain_weights(tile: Tile, activation: str) -> None:
    """Where a tile has as many weight rows as tokens or more, tokens are the first factor."""
    call = make_call("none", tokens=70, top_k=2, hidden=144, inter=112, activation=activation, bias=True)
    check(call, Config(64, 16, tile, tile))


@pytest.mark.parametrize(
    ("scheme", "hidden", "tile", "how"),
    [
        ("mxfp4", 288, Tile(64, 256, 4, 3, 128), "shifted"),  # 9 bytes of scales a row
        ("mxfp4", 576, Tile(64, 128, 4, 3), "shifted"),  # 18
        ("nvfp4", 336, Tile(64, 256, 4, 3), "shifted"),  # 21
        ("nvfp4", 576, Tile(64, 128, 8, 3), "ahead"),  # 2 bytes of scales a thread and step
        ("nvfp4", 576, Tile(64, 128, 4, 3), "copied"),
        ("mxfp4", 160, Tile(64, 64, 4, 3), "ahead"),  # 2 scales a row and step
        ("mxfp4", 64, Tile(64, 128, 4, 3), "shifted"),  # no step at all before the rest
    ],
)
def test_how_scales_are_read(scheme: str, hidden: int, tile: Tile, how: str) -> None:
    call = make_call(scheme, hidden=hidden, inter=hidden, experts=2)
    assert call.w13_scale is not None
    assert launch._scales(tile, make_plan(call).weight1, 2 * hidden, hidden, call.w13_scale) == how
    check(call, Config(16, 16, tile, tile._replace(split_k=2)))


@pytest.mark.parametrize("scheme", ("nvfp4", "none", "fp8"))
def test_tiles_are_as_wide_as_the_tokens_of_an_expert_of_any_rank(scheme: str) -> None:
    sizes: dict[str, Any] = {"top_k": 2, "experts": 4, "hidden": 128, "inter": 64}
    for tokens, alone in ((1, 1), (2, 2), (3, 2), (8, 2), (16, 4), (80, 20), (512, 128)):
        rank = make_plan(make_call(scheme, tokens=tokens, num_experts=16, **sizes))
        assert rank.config == make_plan(make_call(scheme, tokens=alone, **sizes)).config, tokens
        offset = make_call(scheme, tokens=tokens, num_experts=0, local_expert_offset=12, **sizes)
        assert make_plan(offset).config == rank.config, "as many as are needed"
        assert rank.num_slots == 2 * tokens and rank.direct == (tokens == 1)


@pytest.mark.parametrize("act_format", ("none", "nvfp4"))
def test_tiles_with_gaps_between_experts(act_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedule of many slots; experts without rows, with one tile, and with several."""
    call = make_call("nvfp4", act_format, tokens=45, top_k=3, experts=6, foreign=True)
    call.topk_ids[call.topk_ids == 5] = 4
    few = run(call)
    monkeypatch.setattr(schedule, "MANY_SLOTS", 1)
    assert schedule.many_slots(135, 6, 16)
    assert torch.equal(run(call), few)
    call.topk_ids.fill_(-1)
    assert not run(call).any()


@pytest.mark.parametrize("inter", (144, 256, 640))
def test_split_k(inter: int) -> None:
    """Parts that are full, partly beyond K, and all beyond K."""
    config = Config(16, 16, Tile(64, 128, 4, 3), Tile(64, 128, 4, 3, split_k=3))
    check(make_call("nvfp4", bias=True, inter=inter), config)
    check(make_call("none", bias=True, inter=inter, foreign=False), config)


def test_two_runs_are_bitwise_equal() -> None:
    call = make_call("nvfp4", "nvfp4", a1=500.0, a2=300.0, tokens=33)
    assert torch.equal(run(call), run(call))


def test_a_nan_row_disturbs_no_other() -> None:
    call = make_call("nvfp4", "nvfp4", a1=500.0, a2=300.0, tokens=6)
    clean = run(call)
    call.hidden_states[3] = float("nan")
    assert torch.equal(run(call)[[0, 1, 2, 4, 5]], clean[[0, 1, 2, 4, 5]])


def test_reasons_name_what_is_missing() -> None:
    good = moe.Problem("nvfp4", device="cuda", capability=(9, 0), dtype=torch.bfloat16)
    triton = BACKENDS["triton"]
    assert triton.fits_anywhere(good)
    for change, text in (
        ({"scheme": "int3"}, "'int3'"),
        ({"act_format": "int8"}, "'int8'"),
        ({"scheme": "none", "dtype": torch.float32}, "float32"),
        ({"weight_policy": "packed", "act_format": "fp8"}, "weight_policy"),
    ):
        assert any(text in reason for reason in triton.reasons(dataclasses.replace(good, **change)))
    if os.environ.get("TRITON_INTERPRET") != "1":
        assert any("(8, 0)" in reason for reason in triton.reasons(dataclasses.replace(good, capability=(7, 5))))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
