"""INT4 weights beside fp8 activations of many tokens on fp8 tensor cores (cuda_sm90_int4), which round no weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sm90_cases import (
    ACTIVATIONS,
    error_over_bound,
    in_tiles,
    make_call,
    of_a_checkpoint,
    relative_error,
    rounded,
    why_not_here,
)
from tolerances import FP8_SUMS_EXACT
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from triton_cases import packed_input

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS, cuda_sm90
from torch_moe_ops.backends.sm90 import fp8_products, layout
from torch_moe_ops.core.call import ExpertsCall

REASON = why_not_here()
on_hopper = pytest.mark.skipif(bool(REASON), reason=REASON or "it is there")

F16 = torch.float16
# Options of the scales; group -1: a row. Two kernels: bfloat16 scales alone, and all others.
FORMS: dict[str, dict[str, Any]] = {
    "g128": {"group": 128},
    "row": {"group": -1},
    "g128_zp": {"group": 128, "zero": True},
    "g128_f16": {"group": 128, "scale_dtype": F16},
    "g128_zp_f16": {"group": 128, "scale_dtype": F16, "zero": True},
}
KERNELS = ("g128", "g128_zp_f16")
forms = pytest.mark.parametrize("form", FORMS)
# experts, top_k, hidden, inter, tokens: tiles of up to 72, 144, 160 and 256 tokens (`widest_of_int4`), with last steps of
# one tile of K and of two; rows of the intermediate that are too long for rings of them.
SHAPES = (
    (8, 1, 128, 128, 3),
    (8, 2, 192, 176, 20),
    (16, 4, 2880, 704, 9),
    (16, 4, 2688, 1856, 40),
    (8, 2, 2880, 704, 400),
    (60, 6, 2048, 1408, 33),
    (128, 8, 2048, 768, 64),
    (512, 22, 1024, 128, 17),
    (48, 4, 1088, 704, 900),
    (24, 8, 2176, 384, 400),
    (40, 1, 1408, 128, 9000),
    (4, 2, 4096, 1024, 400),
    (2, 1, 2880, 1472, 900),
    (2, 1, 512, 256, 1100),
    (8, 4, 256, 384, 1500),
    (4, 2, 64, 64, 700),
    (2, 1, 128, 17408, 20),
)
# Kernels of each width.
WIDTHS = {
    72: (128, 4, 1088, 320, 400),
    144: (48, 4, 1088, 320, 900),
    160: (8, 2, 512, 320, 300),
    256: (1, 1, 2176, 2048, 400),
}


def case(form: str, **fields: Any) -> ExpertsCall:
    """A group that does not divide a size is a row, and then it is one for both weights."""
    usual: dict[str, Any] = {"hidden": 128, "inter": 128, "out_dtype": torch.float32} | fields
    options = FORMS[form]
    if options["group"] > 0 and (usual["hidden"] % options["group"] or usual["inter"] % options["group"]):
        options = options | {"group": -1}
    return of_a_checkpoint(make_call("int4", "fp8", **usual | {"weights": options}))


def of_shape(form: str, shape: tuple[int, ...], **fields: Any) -> ExpertsCall:
    return case(form, **dict(zip(("experts", "top_k", "hidden", "inter", "tokens"), shape, strict=True)), **fields)


def run(tiled: ExpertsCall) -> Tensor:
    """The output, from a buffer full of NaN."""
    assert fp8_products.takes(tiled)
    shape = (tiled.topk_ids.shape[0], tiled.w2.shape[1] * layout.TILE)
    out = torch.full(shape, float("nan"), dtype=tiled.out_dtype, device=tiled.w2.device)
    fp8_products.run(tiled, out)
    return out


def kernels_of(tiled: ExpertsCall, run: Callable[[ExpertsCall, Tensor], None] = cuda_sm90.run) -> set[str]:
    """Names of the kernels that a call launches on `cuda_sm90_int4`."""
    out = torch.empty((tiled.topk_ids.shape[0], tiled.w2.shape[1] * layout.TILE), dtype=tiled.out_dtype, device="cuda")
    run(tiled, out)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run(tiled, out)
        torch.cuda.synchronize()
    return {event.key for event in profiled.key_averages() if "gemm_kernel" in event.key or "decode" in event.key}


@pytest.mark.parametrize(
    ("options", "takes"),
    (
        ({"group": 128}, True),
        ({"group": -1}, True),
        ({"group": 128, "zero": True}, True),
        ({"group": 128, "scale_dtype": F16}, True),
        ({"group": -1, "scale_dtype": F16, "zero": True}, True),
        ({"group": 64}, False),
        ({"group": 64, "zero": True}, False),
        ({"group": 32}, False),
        ({"group": 32, "zero": True}, False),
        ({"group": 128, "scale_dtype": torch.float32}, False),
    ),
    ids=str,
)
@pytest.mark.parametrize("act_format", ("fp8", "none"))
def test_which_layers_and_how_many_tokens(options: dict[str, Any], takes: bool, act_format: str) -> None:
    """As `explain` says it."""
    experts, top_k = 4, 2
    fields = {"experts": experts, "top_k": top_k, "hidden": 256, "inter": 256, "weights": options}
    least = -(-fp8_products.LEAST_SLOTS * experts // top_k)
    kind = {-1: "row"}.get(options["group"], options["group"])
    dtype = str(options.get("scale_dtype", torch.bfloat16))[6:]
    kinds = f"{dtype} per {kind}{' with zero points' if options.get('zero') else ''}"
    problem = moe.Problem(
        "int4",
        act_format,
        hidden_size=256,
        intermediate_size=256,
        num_experts=experts,
        top_k=top_k,
        weight_scales=kinds,
    )
    notes = BACKENDS["cuda_sm90_int4"].notes
    says = notes is not None and f"fp8 tensor cores from {least} tokens on" in notes(problem)
    assert says == (takes and act_format == "fp8")
    for tokens in (least - 1, least):
        tiled = in_tiles(of_a_checkpoint(make_call("int4", act_format, tokens=tokens, **fields)))
        assert fp8_products.are_faster(tiled) == (says and tokens == least)


def test_tokens_are_those_of_an_expert_of_any_rank() -> None:
    tiled = in_tiles(case("g128", experts=4, top_k=2, tokens=200))
    assert fp8_products.are_faster(tiled)
    assert not fp8_products.are_faster(tiled._replace(num_experts=17))
    assert fp8_products.are_faster(tiled._replace(topk_ids=tiled.topk_ids[:1]), slots=400)


@on_hopper
@pytest.mark.gpu
@forms
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(form: str, shape: tuple[int, ...]) -> None:
    call = of_shape(form, shape)
    out = run(in_tiles(call))
    print(f"{form} {shape} {relative_error(out, call):.2e} of bound {error_over_bound(out, call):.2f}")
    assert error_over_bound(out, call) < 1


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("form", KERNELS)
@pytest.mark.parametrize("activation", ("silu", "gelu", "relu2_no_mul"))
@pytest.mark.parametrize("width", WIDTHS)
def test_each_width_of_tiles(form: str, activation: str, width: int) -> None:
    call = of_shape(form, WIDTHS[width], activation=activation, out_dtype=torch.bfloat16, bias=True)
    tiled = in_tiles(call)
    assert error_over_bound(run(tiled), call) < 1
    names = kernels_of(tiled, fp8_products.run)
    assert names and all(f"PackedCodes<{width}," in name for name in names), names


@on_hopper
@pytest.mark.gpu
@forms
@pytest.mark.parametrize("shape", ((8, 2, 256, 384, 60), (8, 2, 2880, 704, 300), (4, 2, 512, 256, 900)), ids=str)
def test_no_weight_is_rounded(form: str, shape: tuple[int, ...]) -> None:
    """Tokens of -1, 0 and 1 and weights of GEMM1 of few codes and one scale: sums of few bits, all of them exact."""
    call = of_shape(form, shape)
    g = torch.Generator().manual_seed(2)
    call.hidden_states.copy_(torch.randint(-1, 2, call.hidden_states.shape, generator=g))
    nibbles = torch.tensor([0x67, 0x79, 0x87, 0x9A], dtype=torch.uint8)  # around the zero point, 8
    codes = nibbles[torch.randint(0, 4, (*call.w13.shape, 4), generator=g)].view(torch.int32).squeeze(-1)
    call.w13.copy_(codes)
    if call.w13_zero_point is not None:
        call.w13_zero_point.fill_(8)
    assert call.w13_scale is not None
    call.w13_scale.copy_(call.w13_scale[..., :1].expand_as(call.w13_scale).clone())
    assert relative_error(run(in_tiles(call)), call) < FP8_SUMS_EXACT


@on_hopper
@pytest.mark.gpu
@forms
def test_every_code_zero_point_and_place(form: str) -> None:
    """Sums of one product each: a token picks a column of w13 and, by identity codes, of w2; gates are open wide."""
    call = case(form, experts=1, top_k=1, hidden=256, inter=256, tokens=256, activation="identity_no_mul")
    call.hidden_states.copy_(torch.eye(256))
    call.topk_ids.zero_()
    call.topk_weights.fill_(1.0)
    eye = torch.full((1, 256, 256), 8, dtype=torch.int64)
    eye[0, range(256), range(256)] = 9
    words = sum(eye[..., i::8] << 4 * i for i in range(8))
    assert isinstance(words, Tensor) and call.w2_scale is not None
    call.w2.copy_(torch.where(words >= 1 << 31, words - (1 << 32), words).int())
    if call.w2_zero_point is not None:
        call.w2_zero_point.fill_(8)
    call.w2_scale.fill_(1.0)
    assert relative_error(run(in_tiles(call)), call) < 1e-6


@on_hopper
@pytest.mark.gpu
def test_nearer_than_rounded_weights() -> None:
    """What the other kernels of the backend multiply."""
    call = of_shape("g128", (8, 2, 2048, 768, 300))
    of_rounded = relative_error(run(in_tiles(call)), rounded(call))
    assert relative_error(run(in_tiles(call)), call) < 0.6 * of_rounded


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("form", KERNELS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", (True, False))
def test_activations(form: str, activation: str, bias: bool) -> None:
    for inter, tokens in ((176, 40), (256, 500)):
        call = case(form, activation=activation, bias=bias, inter=inter, hidden=256, tokens=tokens)
        assert error_over_bound(run(in_tiles(call)), call) < 1, tokens


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("form", KERNELS)
@pytest.mark.parametrize("out_dtype", (torch.bfloat16, F16))
@pytest.mark.parametrize("activation", ("silu", "relu2_no_mul"))
def test_sixteen_bit_results(form: str, out_dtype: torch.dtype, activation: str) -> None:
    call = case(form, tokens=300, hidden=512, inter=384, out_dtype=out_dtype, activation=activation)
    assert error_over_bound(run(in_tiles(call)), call) < 1


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("form", KERNELS)
@pytest.mark.parametrize(
    "scales", ({"a1": 90.0, "a2": 30.0}, {"a1": "expert", "a2": "expert"}, {"a2": "expert"}), ids=str
)
def test_given_scales_of_activations(form: str, scales: dict[str, Any]) -> None:
    call = case(form, tokens=200, hidden=512, inter=384, experts=8, **scales)
    assert error_over_bound(run(in_tiles(call)), call) < 1


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("form", KERNELS)
@pytest.mark.parametrize("inter", (4096, 14080))
def test_long_rows_that_are_activated_when_they_are_quantized(form: str, inter: int) -> None:
    call = case(form, activation="gelu", inter=inter, tokens=30)
    assert error_over_bound(run(in_tiles(call)), call) < 1


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("form", KERNELS)
@pytest.mark.parametrize("tokens", (9, 300))
def test_foreign_ids_contribute_nothing(form: str, tokens: int) -> None:
    call = case(form, tokens=tokens, top_k=3, foreign=True)
    call.topk_ids[0, 1] = -(2**31)
    call.topk_ids[tokens // 2, 2] = 2**31 - 1
    out = run(in_tiles(call))
    assert not out[-1].any()  # every expert of the last token is foreign
    assert error_over_bound(out, call._replace(topk_weights=call.topk_weights.nan_to_num(1.0))) < 1


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("form", KERNELS)
def test_hot_experts_and_experts_without_tokens(form: str) -> None:
    call = case(form, experts=40, tokens=2600, top_k=3, hidden=1408)
    call.topk_ids[:] = 37
    call.topk_ids[::7, 1] = 3
    assert error_over_bound(run(in_tiles(call)), call) < 1


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("form", KERNELS)
def test_packed_hidden_states_give_the_same_bits(form: str) -> None:
    call = case(form, tokens=200, hidden=320, inter=192)
    packed, tiled = packed_input(call), in_tiles(call)
    states = {"hidden_states": packed.hidden_states, "hidden_states_scale": packed.hidden_states_scale}
    assert torch.equal(run(tiled._replace(**states)), run(tiled))


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("form", KERNELS)
def test_router_weight_on_input(form: str) -> None:
    call = case(form, tokens=100, top_k=1, router_weight_on_input=True)
    assert error_over_bound(run(in_tiles(call)), call) < 1


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("form", KERNELS)
def test_runs_are_bitwise_equal(form: str) -> None:
    tiled = in_tiles(case(form, hidden=1024, inter=384, experts=16, top_k=4, tokens=500))
    first = run(tiled)
    for _ in range(5):
        assert torch.equal(run(tiled), first)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("form", KERNELS)
def test_rows_that_are_not_finite_zero_or_tiny(form: str) -> None:
    call = case(form, tokens=60)
    call.hidden_states[2] = 0.0
    call.hidden_states[5] *= 1e-37
    tiled = in_tiles(call)
    clean = run(tiled)
    assert torch.isfinite(clean).all() and not clean[2].any()
    assert error_over_bound(clean, call) < 1
    tiled.hidden_states[3] = float("nan")
    out = run(tiled)
    others = [row for row in range(60) if row != 3]
    assert out[3].isnan().all() and torch.equal(out[others], clean[others])


@on_hopper
@pytest.mark.gpu
def test_which_kernels_a_number_of_tokens_gets() -> None:
    for options, tokens, takes in (("g128", 300, True), ("g128", 30, False)):
        names = kernels_of(in_tiles(case(options, experts=8, tokens=tokens, hidden=256)))
        assert any("PackedInt4" in name for name in names) == takes, names


@on_hopper
@pytest.mark.gpu
def test_a_layer_from_logits_and_in_a_graph() -> None:
    """Tokens enough, and other routings in the graph; the layer's own call finds the kernel."""
    g = torch.Generator().manual_seed(0)
    w13, w2 = torch.randn(8, 512, 256, generator=g) / 16, torch.randn(8, 256, 256, generator=g) / 16
    raw = moe.quantize_experts(w13.bfloat16(), w2.bfloat16(), "int4").to("cuda")
    w = moe.prepare(raw, act_format="fp8", backend="cuda_sm90_int4")
    x, logits = torch.randn(400, 256, generator=g).bfloat16().cuda(), torch.randn(400, 8, generator=g).cuda()
    routing = moe.Routing("renormalize", 2)
    moe.fused_moe(x, logits, w, routing=routing)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe.fused_moe(x, logits, w, routing=routing)
    oracle = moe.prepare(raw, act_format="fp8", backend="reference")
    for _ in range(3):
        x.copy_(torch.randn(400, 256, generator=g))
        logits.copy_(torch.randn(400, 8, generator=g))
        graph.replay()
        assert torch.equal(out, moe.fused_moe(x, logits, w, routing=routing))
        want = moe.fused_moe(x, logits, oracle, routing=routing).double()
        assert (out.double() - want).norm() < 1.2e-2 * want.norm()


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", ({"group": 64}, {"group": 32}, {"group": 64, "scale_dtype": torch.float32}), ids=str
)
def test_the_op_refuses_other_scales(options: dict[str, Any]) -> None:
    tiled = in_tiles(make_call("int4", "fp8", hidden=256, inter=256, tokens=300, weights=options))
    out = torch.empty((300, 256), dtype=tiled.out_dtype, device="cuda")
    with pytest.raises(RuntimeError, match="scales of int4 weights must be bfloat16 or float16 ones of 128 values"):
        fp8_products.run(tiled, out)


def test_problems_without_top_k_say_nothing() -> None:
    problem = moe.Problem("int4", "fp8", hidden_size=256, intermediate_size=256, num_experts=8)
    assert fp8_products.least_tokens(dataclasses.replace(problem, weight_scales="bfloat16 per 128")) is None
