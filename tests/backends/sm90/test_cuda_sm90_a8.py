"""4-bit weights as they are beside fp8 and mxfp8 activations, on a GPU of compute capability 9.0."""

from __future__ import annotations

from typing import Any

import green_contexts
import pytest
import torch
from sm90_cases import (
    ACTIVATIONS,
    KERNELS,
    SHAPES_OF_ALL,
    in_tiles,
    make_call,
    of_a_checkpoint,
    relative_error,
    run_on,
    why_not_here,
)
from tolerances import layer_bound
from torch.profiler import ProfilerActivity, profile
from triton_cases import packed_input
from triton_weights import of_three_bits

from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.core.schemes import SCHEMES

REASON = why_not_here()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(REASON), reason=REASON or "it is there")]

# Scheme, activation format, scales of tokens and of the intermediate: dynamic or given
FORMS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "nvfp4_fp8": ("nvfp4", "fp8", {}),
    "mxfp4_fp8": ("mxfp4", "fp8", {}),
    "mxfp4_fp8_static": ("mxfp4", "fp8", {"a1": 90.0, "a2": 30.0}),
    "mxfp4_fp8_expert": ("mxfp4", "fp8", {"a1": "expert", "a2": "expert"}),
    "mxfp4_fp8_static_tokens": ("mxfp4", "fp8", {"a1": 90.0}),
    "mxfp4_fp8_expert_intermediate": ("mxfp4", "fp8", {"a2": "expert"}),
    "mxfp4_mxfp8": ("mxfp4", "mxfp8", {}),
    "int4_g32": ("int4", "fp8", {"weights": {"group": 32}}),
    "int4_g128": ("int4", "fp8", {"weights": {"group": 128}}),
    "int4_zp_bf16": ("int4", "fp8", {"weights": {"group": 64, "zero": True}}),
    "int4_zp_f16": ("int4", "fp8", {"weights": {"group": 64, "zero": True, "scale_dtype": torch.float16}}),
    "int4_g32_zp": ("int4", "fp8", {"weights": {"group": 32, "zero": True}}),
    "int4_zp_f32": ("int4", "fp8", {"weights": {"group": 64, "zero": True, "scale_dtype": torch.float32}}),
    "int4_static": ("int4", "fp8", {"a1": 90.0, "a2": 30.0}),
    "int4_expert": ("int4", "fp8", {"a1": "expert", "a2": "expert"}),
}
forms = pytest.mark.parametrize("form", FORMS)
kernels = pytest.mark.parametrize("kernel", KERNELS)
# experts, top_k, hidden, inter, tokens: beside those of all, tokens on one lane of the decode kernel for very few, K of
# odd numbers of tiles, a K in parts, and too many experts for the kernel to share evenly
SHAPES = (
    *SHAPES_OF_ALL,
    (8, 2, 192, 192, 1),
    (16, 4, 2880, 704, 2),
    (16, 8, 2048, 768, 5),
    (128, 4, 2880, 2880, 1),
    (12, 6, 1152, 1408, 8),
    (3, 2, 4096, 2048, 3),
    (2, 1, 128, 17408, 20),
    (4, 2, 7168, 2048, 300),
    (32, 8, 7168, 2048, 14),
    (8, 2, 256, 8192, 3),  # rows in parts, of more row tiles than lanes
    (8, 8, 2048, 768, 8),  # all experts have all tokens, in two entries each
)
# `in_tiles` of MXFP4 needs sizes that are multiples of 32.
OF_MX = {176: 192}


def case(form: str, **fields: Any) -> ExpertsCall:
    scheme, act_format, scales = FORMS[form]
    usual: dict[str, Any] = {"hidden": 128, "inter": 64, "out_dtype": torch.float32}
    fields = usual | scales | fields
    if scheme == "mxfp4":
        fields["inter"] = OF_MX.get(fields["inter"], fields["inter"])
    if scheme != "int4":
        return make_call(scheme, act_format, **fields)
    options = {"group": 64} | fields.get("weights", {})
    if fields["hidden"] % options["group"] or fields["inter"] % options["group"]:
        options["group"] = -1
    return with_short_scales(of_a_checkpoint(make_call(scheme, act_format, **fields | {"weights": options})))


def with_short_scales(call: ExpertsCall) -> ExpertsCall:
    """The same call with int4 weights that all kernels multiply exactly."""
    assert call.w13_scale is not None and call.w2_scale is not None
    return call._replace(w13_scale=of_three_bits(call.w13_scale), w2_scale=of_three_bits(call.w2_scale))


def of_shape(form: str, shape: tuple[int, ...], **fields: Any) -> ExpertsCall:
    return case(form, **dict(zip(("experts", "top_k", "hidden", "inter", "tokens"), shape, strict=True)), **fields)


def error(out: torch.Tensor, call: ExpertsCall) -> float:
    """By the bound of a strict backend; infinite where the result is not finite."""
    values = call.topk_ids.numel() * SCHEMES[call.scheme].logical_k(call.w2.shape[2])
    found = relative_error(out, call) if torch.isfinite(out).all() else float("inf")
    return found / layer_bound("cuda_sm90", call.act_format, call.out_dtype, values, call.activation)


@kernels
@forms
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(form: str, kernel: str, shape: tuple[int, ...]) -> None:
    call = of_shape(form, shape)
    out = run_on(kernel, in_tiles(call))
    print(f"{form} {kernel} {shape} {relative_error(out, call):.2e} of bound {error(out, call):.2f}")
    assert error(out, call) < 1


@forms
@pytest.mark.parametrize("shape", ((16, 4, 2048, 768, 8), (128, 4, 2880, 2880, 3)), ids=("rows", "parts of rows"))
def test_a_token_that_is_not_finite_is_alone(form: str, shape: tuple[int, ...]) -> None:
    call = of_shape(form, shape)
    tiled = in_tiles(call)
    want = run_on("decode", tiled)
    call.hidden_states[1, 7] = float("nan")
    out = run_on("decode", tiled)
    assert out[1].isnan().all()
    others = [token for token in range(shape[-1]) if token != 1]
    assert torch.equal(out[others], want[others])


@forms
def test_thread_blocks_that_make_many_operands(form: str) -> None:
    """On few multiprocessors a block has units of many experts, and makes the rows of each."""
    call = case(form, experts=40, top_k=6, hidden=512, inter=320, tokens=8)
    tiled = in_tiles(call)
    torch.cuda.synchronize()
    with torch.cuda.stream(green_contexts.split(green_contexts.GROUP, 1)[0].stream()):
        out = run_on("decode", tiled)
        torch.cuda.synchronize()
    assert error(out, call) < 1


@forms
def test_very_few_tokens_take_one_launch(form: str) -> None:
    """But with a scale for each expert, of which a token has several."""
    tiled = in_tiles(case(form, tokens=3))
    run_on("decode", tiled)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run_on("decode", tiled)
        torch.cuda.synchronize()
    names = {event.key for event in profiled.key_averages()}
    assert any("decode_few_kernel" in name for name in names) == (FORMS[form][2].get("a1") != "expert")


@forms
@pytest.mark.parametrize("tokens", (9, 13, 16))
@pytest.mark.parametrize("experts", (32, 33, 64))
def test_up_to_sixteen_tokens_take_it_where_experts_have_about_one(form: str, tokens: int, experts: int) -> None:
    call = case(form, tokens=tokens, experts=experts, top_k=2, hidden=320, inter=192)
    call.topk_ids[3:6, 1] = call.topk_ids[3, 0]  # more entries of an expert than others have
    tiled = in_tiles(call)
    out = run_on("decode", tiled)
    assert error(out, call) < 1
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        again = run_on("decode", tiled)
        torch.cuda.synchronize()
    assert torch.equal(again, out)
    names = {event.key for event in profiled.key_averages()}
    takes = FORMS[form][1] == "fp8" and FORMS[form][2].get("a1") != "expert"
    assert any("decode_few_kernel" in name for name in names) == takes


@forms
def test_more_tokens_take_one_launch(form: str) -> None:
    """Operands are rounded between the grid barriers of the decode kernel."""
    tiled = in_tiles(case(form, tokens=20))
    run_on("decode", tiled)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run_on("decode", tiled)
        torch.cuda.synchronize()
    names = [event.key for event in profiled.key_averages() if "moeq::sm90" in event.key]
    assert len(names) == 1 and "decode::decode_kernel" in names[0], names


@kernels
@forms
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", (True, False))
def test_activations(form: str, kernel: str, activation: str, bias: bool) -> None:
    for tokens in (2, 40):
        call = case(form, activation=activation, bias=bias, inter=176, hidden=256, tokens=tokens)
        assert error(run_on(kernel, in_tiles(call)), call) < 1, tokens


@kernels
@forms
@pytest.mark.parametrize("tokens", (1, 5, 50))
def test_foreign_ids_contribute_nothing(form: str, kernel: str, tokens: int) -> None:
    call = case(form, tokens=tokens, top_k=3, foreign=True)
    call.topk_ids[0, 1] = -(2**31)
    call.topk_ids[tokens // 2, 2] = 2**31 - 1
    out = run_on(kernel, in_tiles(call))
    assert not out[-1].any()  # every expert of the last token is foreign
    if tokens > 1:
        assert error(out, call._replace(topk_weights=call.topk_weights.nan_to_num(1.0))) < 1


@kernels
@forms
def test_duplicate_ids_and_skew(form: str, kernel: str) -> None:
    call = case(form, experts=40, tokens=260 if kernel == "prefill" else 8, top_k=3, hidden=256)
    call.topk_ids[:] = 37
    call.topk_ids[::7, 1] = 3
    assert error(run_on(kernel, in_tiles(call)), call) < 1


@kernels
@forms
@pytest.mark.parametrize("out_dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("tokens", (4, 50))
def test_sixteen_bit_results(form: str, kernel: str, out_dtype: torch.dtype, tokens: int) -> None:
    call = case(form, tokens=tokens, hidden=512, inter=320, out_dtype=out_dtype)
    assert error(run_on(kernel, in_tiles(call)), call) < 1


@kernels
@forms
@pytest.mark.parametrize("tokens", (4, 50))
def test_router_weight_on_input(form: str, kernel: str, tokens: int) -> None:
    call = case(form, tokens=tokens, top_k=1, router_weight_on_input=True)
    assert error(run_on(kernel, in_tiles(call)), call) < 1


@kernels
@pytest.mark.parametrize("form", ("nvfp4_fp8", "mxfp4_fp8", "mxfp4_mxfp8", "int4_g128", "int4_zp_f16"))
@pytest.mark.parametrize("tokens", (3, 50))
def test_packed_hidden_states_give_the_same(form: str, kernel: str, tokens: int) -> None:
    call = case(form, tokens=tokens)
    packed, tiled = packed_input(call), in_tiles(call)
    states = {"hidden_states": packed.hidden_states, "hidden_states_scale": packed.hidden_states_scale}
    out = run_on(kernel, tiled._replace(**states))
    assert error(out, call) < 1
    assert kernel == "decode" or torch.equal(out, run_on(kernel, tiled))


@kernels
@forms
@pytest.mark.parametrize("tokens", (3, 200))
def test_runs_are_bitwise_equal(form: str, kernel: str, tokens: int) -> None:
    tokens = tokens if kernel == "prefill" else min(tokens, 8)
    tiled = in_tiles(case(form, hidden=1024, inter=320, experts=16, top_k=4, tokens=tokens))
    first = run_on(kernel, tiled)
    for _ in range(5):
        assert torch.equal(run_on(kernel, tiled), first)


@kernels
@forms
@pytest.mark.parametrize("value", (float("nan"), float("inf")))
def test_a_row_that_is_not_finite_disturbs_no_other(form: str, kernel: str, value: float) -> None:
    tiled = in_tiles(case(form, tokens=6))
    clean = run_on(kernel, tiled)
    tiled.hidden_states[3, 5] = value
    out = run_on(kernel, tiled)
    assert torch.equal(out[[0, 1, 2, 4, 5]], clean[[0, 1, 2, 4, 5]]) and not out[3].isfinite().any()


@kernels
@forms
def test_rows_of_zeros_and_of_tiny_values(form: str, kernel: str) -> None:
    call = case(form, tokens=8)
    call.hidden_states[2] = 0.0
    call.hidden_states[5] *= 1e-30
    out = run_on(kernel, in_tiles(call))
    assert torch.isfinite(out).all() and not out[2].any()
    assert error(out, call) < 1


@kernels
@pytest.mark.parametrize("form", ("nvfp4_fp8", "mxfp4_fp8", "mxfp4_mxfp8", "int4_g128", "int4_zp_f16"))
@pytest.mark.parametrize("tokens", (1, 8, 60))
def test_behind_a_gemm_in_a_graph(form: str, kernel: str, tokens: int) -> None:
    """Hidden states and weights that the kernel in front makes; replays follow new ones."""
    call = case(form, tokens=tokens, experts=8, top_k=4, hidden=256, inter=192)
    tiled = in_tiles(call)
    source = call.hidden_states.clone()
    mix = (torch.eye(256) + torch.randn(256, 256, generator=torch.Generator().manual_seed(3)) / 16).bfloat16().cuda()
    gate = torch.randn(256, 8, generator=torch.Generator().manual_seed(4)).bfloat16().cuda()

    def step() -> torch.Tensor:
        torch.mm(source, mix, out=tiled.hidden_states)
        values, ids = (tiled.hidden_states @ gate).float().softmax(-1).topk(4)
        tiled.topk_ids.copy_(ids.int())
        torch.add(values, 0, out=tiled.topk_weights)
        return run_on(kernel, tiled)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for seed in range(4):
        source.copy_(torch.randn(source.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        replayed = out.clone()
        now = call._replace(hidden_states=tiled.hidden_states, topk_ids=tiled.topk_ids, topk_weights=tiled.topk_weights)
        assert error(replayed, now) < 1
        assert torch.equal(step(), replayed)
