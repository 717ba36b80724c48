"""The `cuda_sm90_fp8` backend against the emulating oracle, on a GPU of compute capability 9.0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from samples import overload
from sm90_cases import make_call, relative_error, why_not_here
from test_triton_schemes import packed_input
from tolerances import FP8_SUMS
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.backends import _sm90_w4a8_layout as layout
from torch_moe_ops.backends import cuda_sm90_fp8
from torch_moe_ops.ops.call import ExpertsCall

REASON = why_not_here()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(REASON), reason=REASON or "it is there")]
NAME = "cuda_sm90_fp8"
schemes = pytest.mark.parametrize("scheme", ("fp8", "fp8_block"))

# experts, top_k, hidden, inter, tokens
SHAPES = (
    (8, 1, 128, 64, 3),
    (8, 2, 200, 136, 20),
    (16, 4, 2880, 704, 9),
    (16, 4, 2688, 1856, 40),
    (128, 8, 2048, 768, 64),
    (4, 2, 4096, 1024, 300),
    (2, 1, 512, 256, 1100),
    (8, 4, 256, 384, 1500),
)


def in_tiles(call: ExpertsCall) -> ExpertsCall:
    """The same call as `prepare` lays its weights out."""
    raw = moe.RawWeights(call.scheme, call.w13, call.w2, call.w13_scale, call.w2_scale)
    inter, halves = raw.intermediate_size, 2 if raw.is_gated else 1
    bias: Tensor | None = call.w13_bias
    if bias is not None:
        bias = F.pad(bias.unflatten(1, (halves, -1)), (0, -inter % layout.TILE_K)).flatten(1)
    return call._replace(**cuda_sm90_fp8.prepare(raw), w13_bias=bias)


def run(tiled: ExpertsCall) -> Tensor:
    """The output, from a buffer full of NaN."""
    out = torch.full(tiled.hidden_states.shape, float("nan"), dtype=tiled.out_dtype, device="cuda")
    cuda_sm90_fp8.run(tiled, out)
    return out


def case(scheme: str, **fields: Any) -> ExpertsCall:
    usual: dict[str, Any] = {"hidden": 128, "inter": 64, "out_dtype": torch.float32}
    return make_call(scheme, "fp8", **usual | fields)


def check(call: ExpertsCall) -> None:
    error = relative_error(run(in_tiles(call)), call)
    print(f"{call.scheme} {call.w2.shape[1]} {error:.2e}")
    assert error < FP8_SUMS  # NaN where the output has one


@schemes
@pytest.mark.parametrize("out_dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(scheme: str, shape: tuple[int, ...], out_dtype: torch.dtype) -> None:
    fields = dict(zip(("experts", "top_k", "hidden", "inter", "tokens"), shape, strict=True))
    check(case(scheme, **fields, out_dtype=out_dtype))


@schemes
@pytest.mark.parametrize("activation", ("silu", "gelu", "swigluoai", "situ", "relu2_no_mul", "silu_no_mul"))
def test_activations(scheme: str, activation: str) -> None:
    check(case(scheme, activation=activation, bias=True, inter=176, hidden=264, tokens=40))


@pytest.mark.parametrize("activation", ("silu", "relu2_no_mul"))
@pytest.mark.parametrize(
    ("a1", "a2", "scales"),
    ((90.0, 30.0, "channel"), ("expert", "expert", "half"), (None, 30.0, "tensor"), ("expert", None, "channel")),
)
def test_scales(a1: Any, a2: Any, scales: str, activation: str) -> None:
    check(case("fp8", a1=a1, a2=a2, weights={"scales": scales}, activation=activation, inter=176, tokens=30))


@schemes
def test_block_scales_that_differ_widely(scheme: str) -> None:
    call = case(scheme, hidden=640, inter=512, tokens=50)
    for scale in (call.w13_scale, call.w2_scale):
        assert scale is not None
        scale.mul_(2.0 ** torch.randint(-6, 7, scale.shape, generator=torch.Generator().manual_seed(1)).to(scale))
    check(call)


@schemes
@pytest.mark.parametrize("tokens", (5, 300))
def test_tokens_that_came_quantized(scheme: str, tokens: int) -> None:
    check(packed_input(case(scheme, tokens=tokens, hidden=392)))


@schemes
def test_foreign_ids_and_router_weight(scheme: str) -> None:
    call = case(scheme, tokens=30, foreign=True)
    out = run(in_tiles(call))
    assert not out[-1].any()  # every expert of the last token is foreign
    assert relative_error(out, call._replace(topk_weights=call.topk_weights.nan_to_num(1.0))) < FP8_SUMS
    check(case(scheme, tokens=30, top_k=1, router_weight_on_input=True))


@schemes
def test_runs_are_bitwise_equal(scheme: str) -> None:
    tiled = in_tiles(case(scheme, hidden=1024, inter=320, experts=16, top_k=4, tokens=500))
    first = run(tiled)
    for _ in range(5):
        assert torch.equal(run(tiled), first)


@schemes
def test_a_nan_row_disturbs_no_other(scheme: str) -> None:
    tiled = in_tiles(case(scheme, tokens=6))
    clean = run(tiled)
    tiled.hidden_states[3] = float("nan")
    assert torch.equal(run(tiled)[[0, 1, 2, 4, 5]], clean[[0, 1, 2, 4, 5]])


def layer(scheme: str, seed: int = 0) -> tuple[moe.RawWeights, moe.PreparedWeights]:
    g = torch.Generator().manual_seed(seed)
    w13, w2 = torch.randn(8, 256, 256, generator=g) / 16, torch.randn(8, 256, 128, generator=g) / 11
    raw = moe.quantize_experts(w13.bfloat16(), w2.bfloat16(), scheme).to("cuda")
    return raw, moe.prepare(raw, act_format="fp8", backend=NAME)


def batch(tokens: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 256, generator=g).bfloat16().cuda()
    ids, weights = moe.route(torch.randn(tokens, 8, generator=g).cuda(), moe.Routing("renormalize", 2))
    return x, ids, weights


@schemes
@pytest.mark.parametrize("tokens", (0, 1, 500))
def test_the_op_against_the_reference_backend(scheme: str, tokens: int) -> None:
    raw, w = layer(scheme)
    x, ids, weights = batch(tokens)
    out = moe.fused_moe_routed(x, ids, weights, w)
    reference = moe.prepare(raw, act_format="fp8", backend="reference")
    expected = moe.fused_moe_routed(x, ids, weights, reference).double()
    assert out.shape == (tokens, 256)
    assert (out.double() - expected).norm() <= FP8_SUMS * expected.norm()


@schemes
def test_a_captured_graph_replays_other_routings_and_weights(scheme: str) -> None:
    _, w = layer(scheme)
    x, ids, weights = batch(400)
    moe.fused_moe_routed(x, ids, weights, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe.fused_moe_routed(x, ids, weights, w)
    for seed in range(2, 5):
        for mine, other in zip((x, ids, weights), batch(400, seed), strict=True):
            mine.copy_(other)
        if seed == 4:
            w.update_(layer(scheme, seed)[0])
        graph.replay()
        assert torch.equal(out, moe.fused_moe_routed(x, ids, weights, w))


@schemes
def test_opcheck(scheme: str) -> None:
    _, w = layer(scheme)
    x, ids, weights = batch(5)
    keywords = {"act_format": "fp8", "backend": NAME}
    torch.library.opcheck(overload(f"{scheme}_moe_routed"), (x, None, ids, weights, *w.op_weights()), keywords)


@schemes
def test_prepare_is_the_same_on_both_devices_and_comes_back(scheme: str) -> None:
    raw, w = layer(scheme)
    for name, tensor in cuda_sm90_fp8.prepare(raw.to("cpu")).items():
        assert torch.equal(tensor, getattr(w, name).cpu()), name
    for name, tensor in moe.restore(w).tensors().items():
        assert torch.equal(tensor.view(torch.uint8), getattr(raw, name).contiguous().view(torch.uint8)), name
