"""Weights of 8 bits beside 16-bit, e4m3 and mxfp8 activations on `cuda_sm90`, against the oracle.

On a GPU of compute capability 9.0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sm90_cases import SHAPES_OF_BYTES, in_tiles, make_call, relative_error, run_on, why_not_here
from tolerances import layer_bound
from torch import Tensor
from triton_cases import packed_input

from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.oracle.reference import experts_reference
from torch_moe_ops.tuning.tuned_kernels import DECODE_MAX_SLOTS

REASON = why_not_here()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(REASON), reason=REASON or "it is there")]

# -a8: beside fp8, or mxfp8.
SCHEMES = ("fp8", "fp8_block", "mxfp8", "int8", "fp8-a8", "fp8_block-a8", "mxfp8-a8")
schemes = pytest.mark.parametrize("scheme", SCHEMES)
of_codes = pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if scheme.endswith("-a8")])
KERNELS = ("decode", "slim", "narrow", "wide")
kernels = pytest.mark.parametrize("kernel", KERNELS)
# Relative L2 of float32 results: codes are exact in bfloat16, so that what is left is float32 sums, and the rounding of
# the intermediate to bfloat16 beside ties, which of few values is `layer_bound`.
BOUND = 2e-4


def case(scheme: str, **fields: Any) -> ExpertsCall:
    usual: dict[str, Any] = {"hidden": 128, "inter": 64, "out_dtype": torch.float32}
    name = scheme.removesuffix("-a8")
    act_format = "none" if name == scheme else "mxfp8" if name == "mxfp8" else "fp8"
    if name == "int8":
        fields["weights"] = {"group": -1} | fields.get("weights", {})
    return make_call(name, act_format, **usual | fields)


def limit(call: ExpertsCall) -> float:
    values = call.topk_ids.numel() * call.w2.shape[2]
    return max(BOUND, layer_bound("cuda_sm90", call.act_format, call.out_dtype, values, call.activation))


def check(kernel: str, call: ExpertsCall) -> Tensor:
    out = run_on(kernel, in_tiles(call))
    error = relative_error(out, call)
    print(
        f"{call.scheme} {call.act_format} {kernel} {tuple(call.w2.shape)} {call.activation} {error:.2e} of {limit(call):.2e}"
    )
    assert error < limit(call)
    return out


@schemes
@pytest.mark.parametrize("shape", SHAPES_OF_BYTES, ids=str)
def test_shapes(scheme: str, shape: tuple[int, ...]) -> None:
    """Every kernel and two dtypes of results against one result of the oracle. Decode has a limit of its own."""
    fields = dict(zip(("experts", "top_k", "hidden", "inter", "tokens"), shape, strict=True))
    calls = [case(scheme, **fields, out_dtype=out_dtype) for out_dtype in (torch.float32, torch.bfloat16)]
    exact = experts_reference(calls[0], dtype=torch.float64)
    for call in calls:
        want = exact.to(call.out_dtype).double()
        for kernel in KERNELS[shape[1] * shape[4] > DECODE_MAX_SLOTS :]:
            error = float((run_on(kernel, in_tiles(call)).double() - want).norm() / want.norm())
            print(f"{scheme} {kernel} {shape} {call.out_dtype} {error:.2e} of {limit(call):.2e}")
            assert error < limit(call), (kernel, call.out_dtype)


@pytest.mark.parametrize("tokens", range(1, 9))
@schemes
def test_few_tokens(scheme: str, tokens: int) -> None:
    check("decode", case(scheme, experts=32, top_k=4, hidden=1024, inter=384, tokens=tokens))
    check("decode", case(scheme, experts=8, top_k=2, hidden=288 if scheme.startswith("mxfp8") else 272, tokens=tokens))


@kernels
@schemes
@pytest.mark.parametrize(
    "activation", ("silu", "gelu", "swigluoai", "situ", "relu2_no_mul", "silu_no_mul", "identity_no_mul")
)
def test_activations(scheme: str, activation: str, kernel: str) -> None:
    for tokens in (5, 40):
        check(kernel, case(scheme, activation=activation, bias=True, inter=160, hidden=288, tokens=tokens))


@kernels
@pytest.mark.parametrize("activation", ("silu", "relu2_no_mul"))
@pytest.mark.parametrize("scales", ("channel", "half", "tensor"))
@pytest.mark.parametrize("scheme", ("fp8", "fp8-a8"))
def test_scales(scheme: str, scales: str, activation: str, kernel: str) -> None:
    for tokens in (5, 30):
        check(kernel, case(scheme, weights={"scales": scales}, activation=activation, inter=176, tokens=tokens))


@kernels
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_dtypes_of_scales_of_int8(dtype: torch.dtype, kernel: str) -> None:
    check(kernel, case("int8", weights={"scale_dtype": dtype}, inter=176, tokens=20))


@kernels
@pytest.mark.parametrize(
    "scales", ({"a1": 90.0, "a2": 30.0}, {"a1": "expert", "a2": "expert"}, {"a1": 90.0}, {"a2": "expert"}), ids=str
)
def test_given_scales_of_activations(scales: dict[str, Any], kernel: str) -> None:
    for tokens in (5, 30):
        check(kernel, case("fp8-a8", inter=320, hidden=512, tokens=tokens, **scales))


@kernels
def test_every_int8_code(kernel: str) -> None:
    """Results of one token that picks columns of weights: codes times scales, -128 among them, exactly."""
    call = case("int8", experts=1, top_k=1, hidden=256, inter=256, tokens=1, activation="identity_no_mul")
    codes = torch.arange(-128, 128, dtype=torch.int8, device=call.w13.device)
    call.w13.copy_(codes.view(1, 1, 256).expand_as(call.w13))
    call.w2.copy_(torch.eye(256, dtype=torch.int8, device=codes.device)[None])
    one = torch.zeros_like(call.hidden_states)
    for column in (0, 1, 127, 128, 129, 255):
        one[0, :] = 0
        one[0, column] = 1
        out = run_on(kernel, in_tiles(call._replace(hidden_states=one)))
        assert call.w13_scale is not None and call.w2_scale is not None
        middle = (float(codes[column]) * call.w13_scale[0, :, 0].float()).to(torch.bfloat16).float()
        expected = middle * call.w2_scale[0, :, 0].float() * call.topk_weights
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=0)


@kernels
@of_codes
def test_hidden_states_that_are_codes(scheme: str, kernel: str) -> None:
    for tokens in (1, 7, 200):
        call = case(scheme, hidden=640, inter=384, tokens=tokens)
        same = "slim" if kernel == "decode" else kernel  # which takes them for decode
        assert torch.equal(run_on(kernel, in_tiles(packed_input(call))), run_on(same, in_tiles(call)))


@of_codes
def test_groups_that_differ_widely(scheme: str) -> None:
    """A scale of each 128 values of a token, and of each token, tile by tile."""
    for kernel, tokens in (("decode", 6), ("slim", 30), ("narrow", 150), ("wide", 300)):
        call = case(scheme, hidden=1024, inter=640, experts=4, tokens=tokens)
        powers = torch.randint(-9, 10, (tokens, 8), generator=torch.Generator().manual_seed(2))
        call.hidden_states.mul_((2.0**powers).repeat_interleave(128, dim=1).to(call.hidden_states))
        check(kernel, call)


@kernels
@schemes
def test_scales_that_differ_widely(scheme: str, kernel: str) -> None:
    for tokens in (4, 50):
        call = case(scheme, hidden=640, inter=512, tokens=tokens)
        for scale in (call.w13_scale, call.w2_scale):
            assert scale is not None
            powers = torch.randint(-6, 7, scale.shape, generator=torch.Generator().manual_seed(1)).to(scale.device)
            if scheme.startswith("mxfp8"):
                scale.copy_((scale.int() + powers).clamp(min=0).to(scale))
            else:
                scale.mul_(2.0**powers)
        check(kernel, call)


@kernels
@schemes
def test_blocks_of_zeros(scheme: str, kernel: str) -> None:
    """A scale of zero (of mxfp8: the smallest one) makes nothing but zeros of its block."""
    call = case(scheme, hidden=640, inter=512, tokens=6)
    for scale in (call.w13_scale, call.w2_scale):
        assert scale is not None
        scale.view(-1)[::3] = 0
    check(kernel, call)


@kernels
@schemes
def test_foreign_ids_and_router_weight(scheme: str, kernel: str) -> None:
    for tokens in (6, 30):
        call = case(scheme, tokens=tokens, foreign=True)
        out = run_on(kernel, in_tiles(call))
        assert not out[-1].any()  # every expert of the last token is foreign
        assert relative_error(out, call._replace(topk_weights=call.topk_weights.nan_to_num(1.0))) < limit(call)
        check(kernel, case(scheme, tokens=tokens, top_k=1, router_weight_on_input=True))


@kernels
@schemes
def test_a_nan_row_disturbs_no_other(scheme: str, kernel: str) -> None:
    for bad in (float("nan"), float("inf")):
        tiled = in_tiles(case(scheme, tokens=6))
        clean = run_on(kernel, tiled)
        tiled.hidden_states[3, :7] = bad
        out = run_on(kernel, tiled)
        assert torch.equal(out[[0, 1, 2, 4, 5]], clean[[0, 1, 2, 4, 5]])
        assert not out[3].isfinite().any()
