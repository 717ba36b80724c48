"""The Hopper kernels against the oracle, on a GPU of compute capability 9.0."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from samples import overload
from sm90_cases import (
    ACTIVATIONS,
    KERNELS,
    SHAPES_OF_ALL,
    error_of,
    in_tiles,
    make_call,
    number_of,
    relative_error,
    run_on,
    why_not_here,
)
from sm90_layers import batch, check_graph, random_raw

import torch_moe_ops as moe
from torch_moe_ops.backends import cuda_sm90
from torch_moe_ops.backends.sm90 import choice as sm90_choice
from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.numerics.nvfp4 import quantize_activation

REASON = why_not_here()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(REASON), reason=REASON or "it is there")]
kernels = pytest.mark.parametrize("kernel", KERNELS)

# Codes and block scales are exact; what is left is the order of float32 sums, which rounds the intermediate and the
# output differently.
LIMIT = 2e-3
LIMIT_BF16 = 4e-3

SHAPES = (
    *SHAPES_OF_ALL,
    (256, 8, 1024, 256, 130),
    (512, 10, 1024, 256, 24),
    (4, 2, 7168, 2048, 300),
    (16, 16, 4096, 256, 8),  # few tokens, but more sums than their kernel can exchange
)
QUANTIZED = (
    {"a1": 500.0, "a2": 300.0},
    {"a1": "expert", "a2": "expert"},
    {"a1": None, "a2": None},
    {"a1": None, "a2": 300.0},
    {"a1": "expert", "a2": None},
)


def fields_of(shape: tuple[int, ...]) -> dict[str, Any]:
    return dict(zip(("experts", "top_k", "hidden", "inter", "tokens"), shape, strict=True))


@kernels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(kernel: str, shape: tuple[int, ...]) -> None:
    assert error_of(kernel, **fields_of(shape)) < LIMIT_BF16
    assert error_of(kernel, **fields_of(shape), out_dtype=torch.float32) < LIMIT


# One token, whose units of GEMM1 do not come out even over 132 multiprocessors: cut into two or four parts, with whole
# ones beside them or none, or not worth cutting, or not cut because slots are more than a warp's lanes.
ONE_TOKEN = (
    (128, 8, 2048, 768, 1),
    (64, 8, 2048, 544, 1),
    (16, 6, 1024, 768, 1),
    (8, 2, 1088, 256, 1),
    (8, 2, 512, 160, 1),
    (40, 22, 576, 64, 1),
    (8, 2, 256, 256, 1),
    (128, 4, 2880, 2880, 1),
    (64, 40, 1024, 256, 1),
)


@pytest.mark.parametrize("shape", ONE_TOKEN, ids=str)
@pytest.mark.parametrize("fields", ({}, {"act_format": "nvfp4", "a1": 500.0, "a2": 300.0}, {"bias": True}), ids=str)
@pytest.mark.parametrize("scheme", ("nvfp4", "mxfp4"))
def test_one_token(scheme: str, fields: dict[str, Any], shape: tuple[int, ...]) -> None:
    if scheme == "mxfp4" and "a1" in fields:
        pytest.skip("MXFP4 weights are multiplied by 16-bit activations")
    call = make_call(scheme, **fields_of(shape), **fields, out_dtype=torch.float32)
    out = run_on("decode", in_tiles(call))
    assert relative_error(out, call) < LIMIT
    assert all(torch.equal(run_on("decode", in_tiles(call)), out) for _ in range(4))


@pytest.mark.parametrize("act_format", ("none", "nvfp4"))
def test_one_token_of_some_local_experts(act_format: str) -> None:
    """What is dealt to the blocks is known only when the ids are."""
    scales = {"a1": 500.0, "a2": 300.0} if act_format == "nvfp4" else {}
    for local in range(9):
        call = make_call("nvfp4", act_format, **fields_of((32, 8, 1024, 768, 1)), **scales, out_dtype=torch.float32)
        ids = torch.arange(8, device=call.topk_ids.device, dtype=torch.int32) * 3
        ids[local:] += 32
        call = call._replace(topk_ids=ids[None])
        out = run_on("decode", in_tiles(call))
        assert out.any() == (local > 0)
        assert local == 0 or relative_error(out, call) < LIMIT, local


@kernels
@pytest.mark.parametrize("shape", SHAPES[1:8:2], ids=str)
@pytest.mark.parametrize("scales", QUANTIZED, ids=str)
def test_quantized_activations(kernel: str, scales: dict[str, Any], shape: tuple[int, ...]) -> None:
    fields = {"act_format": "nvfp4", "out_dtype": torch.float32, **fields_of(shape), **scales}
    assert error_of(kernel, **fields) < LIMIT


@kernels
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("act_format", "bias"), (("none", True), ("nvfp4", True), ("nvfp4", False)))
def test_activations(kernel: str, activation: str, act_format: str, bias: bool) -> None:
    scales: dict[str, Any] = {"a1": 500.0, "a2": 300.0} if act_format == "nvfp4" else {}
    fields = {"act_format": act_format, "activation": activation, "bias": bias, "inter": 176, **scales}
    assert error_of(kernel, **fields, tokens=11, out_dtype=torch.float32) < LIMIT


@kernels
def test_situ_of_tiny_numbers(kernel: str) -> None:
    call = make_call(activation="situ", hidden=256, inter=128, tokens=12, out_dtype=torch.float32)
    call = call._replace(hidden_states=call.hidden_states * 2.0**-20)
    assert relative_error(run_on(kernel, in_tiles(call)), call) < LIMIT


@kernels
def test_silu_with_a_limit(kernel: str) -> None:
    call = make_call("nvfp4", hidden=128, inter=64, constants=(None, None, 0.02))
    limited = run_on(kernel, in_tiles(call))
    assert relative_error(limited, call) < LIMIT_BF16
    assert relative_error(limited, call._replace(swiglu_limit=float("inf"))) > 0.01


@kernels
@pytest.mark.parametrize("per_half", (True, False))
def test_alphas_of_gate_and_up(kernel: str, per_half: bool) -> None:
    assert error_of(kernel, per_half=per_half) < LIMIT_BF16


@kernels
@pytest.mark.parametrize("act_format", ("none", "nvfp4"))
@pytest.mark.parametrize("tokens", (1, 9, 100))
def test_foreign_ids_contribute_nothing(kernel: str, act_format: str, tokens: int) -> None:
    a1 = "expert" if act_format == "nvfp4" else None
    call = make_call("nvfp4", act_format, hidden=128, inter=64, tokens=tokens, top_k=3, foreign=True, a1=a1)
    call.topk_ids[0, 1] = -(2**31)
    call.topk_ids[tokens // 2, 2] = 2**31 - 1
    out = run_on(kernel, in_tiles(call))
    assert not out[-1].any()  # every expert of the last token is foreign
    if tokens > 1:
        assert relative_error(out, call._replace(topk_weights=call.topk_weights.nan_to_num(1.0))) < LIMIT_BF16


@kernels
def test_duplicate_ids_add(kernel: str) -> None:
    call = make_call("nvfp4", hidden=128, inter=64, top_k=3)
    call.topk_ids[:] = 2
    assert relative_error(run_on(kernel, in_tiles(call)), call) < LIMIT_BF16


@kernels
@pytest.mark.parametrize("tokens", (17, 260))
def test_skewed_and_empty_experts(kernel: str, tokens: int) -> None:
    """Nearly all tokens at one expert, most experts without any."""
    call = make_call("nvfp4", hidden=256, inter=128, experts=40, tokens=tokens, top_k=2)
    call.topk_ids[:, 0] = 37
    call.topk_ids[:, 1] = torch.where(torch.arange(tokens, device=call.topk_ids.device) % 7 == 0, 3, 38).int()
    assert relative_error(run_on(kernel, in_tiles(call)), call) < LIMIT_BF16


@kernels
@pytest.mark.parametrize("act_format", ("none", "nvfp4"))
def test_router_weight_on_input(kernel: str, act_format: str) -> None:
    assert error_of(kernel, act_format=act_format, top_k=1, router_weight_on_input=True) < LIMIT_BF16


@kernels
def test_packed_hidden_states_give_the_same_bits(kernel: str) -> None:
    call = make_call("nvfp4", "nvfp4", a1=500.0, a2=300.0, hidden=128, inter=64)
    codes, scale = quantize_activation(call.hidden_states.cpu(), torch.tensor(500.0))
    tiled = in_tiles(call)
    packed = tiled._replace(hidden_states=codes.cuda(), hidden_states_scale=scale.cuda())
    assert torch.equal(run_on(kernel, packed), run_on(kernel, tiled))


@kernels
@pytest.mark.parametrize("out_dtype", (torch.bfloat16, torch.float16, torch.float32))
def test_output_dtypes(kernel: str, out_dtype: torch.dtype) -> None:
    assert error_of(kernel, act_format="nvfp4", a1=500.0, a2=300.0, out_dtype=out_dtype) < LIMIT_BF16


@kernels
@pytest.mark.parametrize("act_format", ("none", "nvfp4"))
def test_runs_are_bitwise_equal(kernel: str, act_format: str) -> None:
    tiled = in_tiles(make_call("nvfp4", act_format, hidden=512, inter=320, experts=16, top_k=4, tokens=50))
    first = run_on(kernel, tiled)
    for _ in range(5):
        assert torch.equal(run_on(kernel, tiled), first)


@kernels
def test_a_nan_row_disturbs_no_other(kernel: str) -> None:
    tiled = in_tiles(make_call("nvfp4", "nvfp4", a1=500.0, a2=300.0, hidden=128, inter=64, tokens=6))
    clean = run_on(kernel, tiled)
    tiled.hidden_states[3] = float("nan")
    assert torch.equal(run_on(kernel, tiled)[[0, 1, 2, 4, 5]], clean[[0, 1, 2, 4, 5]])


@kernels
def test_views_at_odd_addresses(kernel: str) -> None:
    tiled = in_tiles(make_call("nvfp4", hidden=128, inter=64))
    want = run_on(kernel, tiled)
    x = torch.empty(tiled.hidden_states.numel() + 1, dtype=torch.bfloat16, device="cuda")[1:].view(5, 128)
    x.copy_(tiled.hidden_states)
    out = torch.empty(5 * 128 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(5, 128)
    cuda_sm90.run_kernel(tiled._replace(hidden_states=x), out, number_of(kernel, tiled))
    assert torch.equal(out, want)


def backend_call(**fields: Any) -> tuple[ExpertsCall, ExpertsCall]:
    call = make_call("nvfp4", **{"hidden": 256, "inter": 128, "experts": 8, "top_k": 2} | fields)
    return call, in_tiles(call)


@pytest.mark.parametrize("ranks", (1, 4))
@pytest.mark.parametrize("act_format", ("none", "nvfp4"))
def test_every_number_of_tokens_around_the_switch(act_format: str, ranks: int) -> None:
    """With more ranks all slots are local ones all the same, which is not what the choice expects."""
    switch = sm90_choice.decode_max_tokens(8, 2, 256 * 128)
    for tokens in (0, 1, 2, 3, 5, 8, 9, switch - 1, switch, switch + 1, switch + 2, 2 * switch + 1):
        call, tiled = backend_call(act_format=act_format, tokens=tokens, num_experts=8 * ranks)
        out = torch.full((tokens, 256), float("nan"), dtype=torch.bfloat16, device="cuda")
        if tokens:
            cuda_sm90.run(tiled, out)
            assert relative_error(out, call) < LIMIT_BF16, tokens


def random_fields(seed: int) -> dict[str, Any]:
    """A problem of any kind whose weights stay below 40 MB."""
    draw = random.Random(seed)
    hidden, inter = draw.choice((256, 1024, 2048, 2688, 2880)), draw.choice((64, 176, 704, 1408, 1856))
    most = max(8, min(512, 80_000_000 // (3 * hidden * inter)))
    experts = round(math.exp(draw.uniform(math.log(8), math.log(most))))
    return {
        "seed": seed,
        "experts": experts,
        "top_k": draw.randint(1, min(22, experts)),
        "hidden": hidden,
        "inter": inter,
        "tokens": round(math.exp(draw.uniform(0, math.log(400)))),
        "activation": draw.choice(ACTIVATIONS),
        "bias": draw.random() < 0.3,
        **draw.choice(({}, {}, *({"act_format": "nvfp4", **scales} for scales in QUANTIZED))),
    }


@pytest.mark.parametrize("skewed", (True, False))
@pytest.mark.parametrize("seed", range(16))
def test_random_problems(seed: int, skewed: bool) -> None:
    fields = random_fields(seed)
    call = make_call("nvfp4", **fields, out_dtype=torch.float32)
    if skewed:  # an expert that all tokens go to, many that none does
        first = call.topk_ids.remainder(max(fields["top_k"], fields["experts"] // 3))
        call = call._replace(topk_ids=torch.where(first == first[:, :1], first[0, 0], first))
    out = torch.full(call.hidden_states.shape, float("nan"), device="cuda")
    cuda_sm90.run(in_tiles(call), out)
    assert relative_error(out, call) < LIMIT, fields


def layer(act_format: str) -> tuple[moe.RawWeights, moe.PreparedWeights]:
    raw = random_raw("nvfp4")
    return raw, moe.prepare(raw, act_format=act_format, backend="cuda_sm90")


@pytest.mark.parametrize("act_format", ("none", "nvfp4"))
@pytest.mark.parametrize("tokens", (0, 1, 7, 500))
def test_the_op_against_the_reference_backend(act_format: str, tokens: int) -> None:
    raw, w = layer(act_format)
    x, ids, weights = batch(tokens)
    out = moe.fused_moe_routed(x, ids, weights, w)
    reference = moe.prepare(raw, act_format=act_format, backend="reference")
    expected = moe.fused_moe_routed(x, ids, weights, reference).double()
    assert out.shape == (tokens, 256)
    assert (out.double() - expected).norm() <= LIMIT_BF16 * expected.norm()


@pytest.mark.parametrize("act_format", ("none", "nvfp4"))
@pytest.mark.parametrize("tokens", (3, 400))
def test_a_captured_graph_replays_other_routings_and_weights(act_format: str, tokens: int) -> None:
    raw, w = layer(act_format)
    check_graph(w, tokens, lambda seed: random_raw("nvfp4", seed))
    assert not torch.equal(moe.restore(w).w13, raw.w13)


@pytest.mark.parametrize("act_format", ("none", "nvfp4"))
def test_opcheck(act_format: str) -> None:
    _, w = layer(act_format)
    x, ids, weights = batch(5)
    for name in ("nvfp4_moe_routed", "nvfp4_moe_routed.out"):
        keywords = {"act_format": act_format, "backend": "cuda_sm90"}
        extra = {"out": torch.empty_like(x)} if name.endswith(".out") else {}
        torch.library.opcheck(overload(name), (x, None, ids, weights, *w.op_weights()), {**keywords, **extra})


def test_compiled_in_one_graph() -> None:
    _, w = layer("none")
    compiled = torch.compile(lambda x, i, g: x + moe.fused_moe_routed(x * 2, i, g, w), fullgraph=True)
    x, ids, weights = batch(6)
    assert torch.equal(compiled(x, ids, weights), x + moe.fused_moe_routed(x * 2, ids, weights, w))


def test_other_hidden_dtypes_are_refused() -> None:
    _, w = layer("none")
    x, ids, weights = batch(3)
    with pytest.raises(RuntimeError, match=r"hidden_states must have one of the dtypes .*bfloat16.*got torch.float32"):
        moe.fused_moe_routed(x.float(), ids, weights, w)


def test_prepare_is_the_same_on_both_devices() -> None:
    raw, w = layer("none")
    for name, tensor in cuda_sm90.prepare(raw.to("cpu")).items():
        assert torch.equal(tensor, getattr(w, name).cpu()), name
    for name, tensor in moe.restore(w).tensors().items():
        assert torch.equal(tensor.view(torch.uint8), getattr(raw, name).contiguous().view(torch.uint8)), name
