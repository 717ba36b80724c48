"""The Triton engine against the oracle, every scheme and activation format, on the GPU or in Triton's interpreter."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton_cases import DEVICE, empty_output, make_call, packed_input, relative_error

from torch_moe_ops.backends import triton as backend
from torch_moe_ops.backends.triton_engine import launch
from torch_moe_ops.backends.triton_engine.configs import Config, Tile
from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.core.schemes import SCHEMES

pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or TRITON_INTERPRET=1"
)

LIMIT = 2e-3
PAIRS = [(scheme, act) for scheme in SCHEMES for act in SCHEMES[scheme].act_formats]
# In the interpreter: one activation format a scheme, another one each time, for what has little to do with it.
FEW = PAIRS if DEVICE == "cuda" else [(s, list(SCHEMES[s].act_formats)[i % 2 - 1]) for i, s in enumerate(SCHEMES)]
SMALL = Config(16, 16, Tile(64, 64, 4, 3), Tile(64, 64, 4, 3))
WHOLE = Config(16, 16, Tile(256, 256, 8, 3), Tile(256, 256, 8, 3))


def run(call: ExpertsCall, config: Config | None = None) -> torch.Tensor:
    """config: None for that of the rules; in the interpreter tiles of a whole matrix, as programs are what costs."""
    out = empty_output(call)
    if config is None and DEVICE == "cuda":
        backend.run(call, out)
    else:
        launch.run_experts(call, out, config or WHOLE)
    return out


def check(call: ExpertsCall, config: Config | None = None) -> None:
    out = run(call, config)
    error = relative_error(out, call)
    print(f"{call.scheme:>11} {call.act_format:>11} {str(call.out_dtype)[6:]:>9} {error:.2e}")
    assert torch.isfinite(out).all()
    assert error < LIMIT


def sizes(scheme: str) -> tuple[tuple[int, int], ...]:
    """Not whole tiles; on a GPU odd ones that the scheme allows, and whole tiles (sizes of models: test_gpu_schemes)."""
    block = max(SCHEMES[scheme].size_multiple, 8)
    small = ((160, 224),) if block == 32 else ((208, 176),)
    return small if DEVICE == "cpu" else (*small, (96, 32 + block), (2048, 768))


@pytest.mark.parametrize(("scheme", "act_format"), PAIRS)
def test_all_formats(scheme: str, act_format: str) -> None:
    for hidden, inter in sizes(scheme):
        check(make_call(scheme, act_format, hidden=hidden, inter=inter, out_dtype=torch.float32, bias=True))
    if DEVICE == "cuda":
        check(make_call(scheme, act_format, hidden=160, inter=96, bias=True))  # to bfloat16


@pytest.mark.parametrize(("scheme", "act_format"), FEW)
def test_float16(scheme: str, act_format: str) -> None:
    call = make_call(scheme, act_format, hidden=160, inter=96, dtype=torch.float16, activation="relu2_no_mul")
    check(call)


@pytest.mark.parametrize(("scheme", "act_format"), FEW)
def test_one_token(scheme: str, act_format: str) -> None:
    call = make_call(scheme, act_format, tokens=1, top_k=4, hidden=160, inter=96, out_dtype=torch.float32)
    call.topk_ids[0, 1] = -1
    check(call)


@pytest.mark.parametrize(("scheme", "act_format"), FEW)
def test_many_tiles(scheme: str, act_format: str) -> None:
    """Several tiles of tokens an expert, an expert without any, foreign ids, parts of K."""
    tile = Tile(64, 64, 4, 3)
    config = Config(32, 16, tile, tile._replace(split_k=2))
    call = make_call(
        scheme,
        act_format,
        tokens=40 if DEVICE == "cuda" else 20,
        hidden=288,
        inter=160,
        out_dtype=torch.float32,
        foreign=True,
    )
    call.topk_ids[call.topk_ids == 4] = 5
    call = call._replace(topk_weights=call.topk_weights.nan_to_num(1.0))
    check(call, config)


@pytest.mark.parametrize("scale_dtype", (torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.parametrize(("group", "zero"), [(g, z) for g in (32, 64, 128, -1) for z in (False, True)])
@pytest.mark.parametrize("scheme", ("int4", "int8"))
def test_integer_groups(scheme: str, group: int, zero: bool, scale_dtype: torch.dtype) -> None:
    if DEVICE == "cpu" and (scale_dtype == torch.float16) != (group == 64):
        pytest.skip("dtypes and groups one against one in the interpreter")
    for act_format in SCHEMES[scheme].act_formats:
        weights = {"group": group, "zero": zero, "scale_dtype": scale_dtype}
        sizes = {"hidden": 256, "inter": 128, "tokens": 5 if DEVICE == "cuda" else 2}
        call = make_call(scheme, act_format, weights=weights, out_dtype=torch.float32, **sizes)
        check(call, SMALL if group == 128 else None)


@pytest.mark.parametrize("act_format", ("fp8", "none"))
@pytest.mark.parametrize("scales", ("channel", "half", "tensor"))
def test_scales_of_fp8_weights(scales: str, act_format: str) -> None:
    for activation in ("silu", "relu2_no_mul"):
        kind = "tensor" if scales == "half" and activation != "silu" else scales
        check(make_call("fp8", act_format, activation=activation, weights={"scales": kind}, out_dtype=torch.float32))


@pytest.mark.parametrize(("scheme", "act_format"), (("fp8", "fp8"), ("mxfp4", "fp8"), ("int8", "int8")))
@pytest.mark.parametrize(("a1", "a2"), ((90.0, 30.0), ("expert", "expert"), (None, 30.0), ("expert", None)))
def test_given_input_scales(scheme: str, act_format: str, a1: Any, a2: Any) -> None:
    scaled = {"a1": a1, "a2": a2} if act_format == "fp8" else {"a1": 30.0 if a1 == 90.0 else a1, "a2": a2}
    check(make_call(scheme, act_format, hidden=96, inter=160, out_dtype=torch.float32, **scaled))


@pytest.mark.parametrize("config", (SMALL, Config(16, 16, Tile(256, 128, 8, 3), Tile(128, 128, 4, 3))))
def test_tiles_of_scales(config: Config) -> None:
    """A tile of GEMM1 with and without whole groups of the intermediate; halves that end inside a tile of scales."""
    for hidden, inter in ((264, 136), (128, 256)):
        for act_format in ("fp8", "none"):
            call = make_call("fp8_block", act_format, tokens=3, experts=2, hidden=hidden, inter=inter)
            check(call._replace(out_dtype=torch.float32), config)


# In the interpreter every activation format once.
QUANTIZED = {
    (a, s == "fp8_block") if DEVICE == "cpu" else (s, a): (s, a) for s, a in PAIRS if a not in ("none", "nvfp4")
}


@pytest.mark.parametrize(("scheme", "act_format"), QUANTIZED.values())
def test_packed_hidden_states(scheme: str, act_format: str) -> None:
    for tokens in (6,) if DEVICE == "cpu" else (1, 6):
        call = make_call(scheme, act_format, tokens=tokens, hidden=160, inter=96)
        out = run(packed_input(call))
        assert torch.equal(out, run(call))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_router_weight_on_input(scheme: str) -> None:
    for act_format in SCHEMES[scheme].act_formats[:2]:
        call = make_call(scheme, act_format, hidden=96, inter=64, top_k=1, router_weight_on_input=True)
        check(call)


@pytest.mark.parametrize(("scheme", "act_format"), (("mxfp4", "none"), ("mxfp8", "mxfp8"), ("mxfp6_e3m2", "none")))
def test_block_exponents_of_every_size(scheme: str, act_format: str) -> None:
    """Weights far from one: what the decoded form leaves out of its exponents comes back."""
    for shift in (-40, 30):
        call = make_call(scheme, act_format, hidden=96, inter=64, out_dtype=torch.float32, activation="identity_no_mul")
        call.w13_scale[:] = (call.w13_scale.int() + shift).clamp(0, 254).to(torch.uint8)
        call.w2_scale[:] = (call.w2_scale.int() - shift).clamp(0, 254).to(torch.uint8)
        check(call)


def test_two_runs_are_bitwise_equal() -> None:
    for scheme, act_format in PAIRS if DEVICE == "cuda" else PAIRS[:1]:
        call = make_call(scheme, act_format, tokens=7, hidden=96, inter=64)
        assert torch.equal(run(call), run(call))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "-s"]))
