"""The fp8 kernels for Hopper against the oracle of their weight policy, on a GPU of compute capability 9.0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sm90_cases import ACTIVATIONS, SHAPES_OF_ALL, error_over_bound, make_call, relative_error, why_not_here
from tolerances import F32, FP8_SUMS_EXACT
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from torch_moe_ops.backends import cuda_sm90_w4a8
from torch_moe_ops.backends.sm90 import w4a8_layout as layout
from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.core.kernel_facts import Sm90Few
from torch_moe_ops.oracle.reference import experts_reference

REASON = why_not_here()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(REASON), reason=REASON or "it is there")]
# Of NVFP4 weights, and after the dash of others.
POLICIES = ("packed", "folded", "packed-mxfp4", "folded-mxfp4")
policies = pytest.mark.parametrize("policy", POLICIES)

# Also tiles of up to 160 and of up to 256 tokens, and an intermediate that is too long for rings of its rows.
SHAPES = (*SHAPES_OF_ALL, (4, 2, 4096, 1024, 300), (2, 1, 512, 256, 1100), (2, 1, 128, 17408, 20))


def in_tiles(call: ExpertsCall) -> ExpertsCall:
    """The same call as `prepare` lays its weights out."""
    assert call.w13_scale is not None and call.w2_scale is not None
    gated = not call.activation.endswith("_no_mul")
    halves, folded = 2 if gated else 1, call.weight_policy == "folded"
    extra = -call.w2.shape[2] * 2 % layout.TILE_K
    bias: Tensor | None = call.w13_bias
    if bias is not None:
        bias = F.pad(bias.unflatten(1, (halves, -1)), (0, extra)).flatten(1)
    lay = layout.fold if folded else layout.pack
    rows13 = halves * (call.w2.shape[2] * 2 + extra)
    w13, w13_scale = lay(call.w13, call.w13_scale, rows13, gated, "w13")
    w2, w2_scale = lay(call.w2, call.w2_scale, layout.padded_rows(call.w2.shape[1], False), False, "w2")
    w2_scale = w2_scale[:, : call.w2.shape[1]].contiguous() if folded else w2_scale
    return call._replace(w13=w13, w13_scale=w13_scale, w13_bias=bias, w2=w2, w2_scale=w2_scale)


def run(tiled: ExpertsCall, decode_tokens: int = 0) -> Tensor:
    """The output, from a buffer full of NaN."""
    out = torch.full(tiled.hidden_states.shape, float("nan"), dtype=tiled.out_dtype, device="cuda")
    cuda_sm90_w4a8.run("rows" if tiled.weight_policy == "folded" else "packed", tiled, out, decode_tokens)
    return out


def case(policy: str, **fields: Any) -> ExpertsCall:
    """Of MXFP4 an intermediate size that is no multiple of 32 becomes the next smaller one."""
    name, _, scheme = policy.partition("-")
    usual: dict[str, Any] = {"hidden": 128, "inter": 64, "weight_policy": name} | fields
    usual["inter"] -= usual["inter"] % (32 if scheme else 16)
    return make_call(scheme or "nvfp4", "fp8", **usual)


def with_scales(call: ExpertsCall, first: int, last: int) -> ExpertsCall:
    """Scale bytes from `first` to `last`."""
    for scale in (call.w13_scale, call.w2_scale):
        assert scale is not None
        g = torch.Generator().manual_seed(3)
        scale.view(torch.uint8).copy_(torch.randint(first, last + 1, scale.shape, generator=g, dtype=torch.uint8))
    return call


def with_scales_of_every_size(call: ExpertsCall) -> ExpertsCall:
    """Of MXFP4 over 30 binades, of which a row's largest is some 2^-7: products are subnormal in e4m3 or vanish."""
    return with_scales(call, 90, 120) if call.scheme == "mxfp4" else with_scales(call, 0, 126)


def error_of(policy: str, **fields: Any) -> float:
    """By its bound."""
    call = case(policy, **fields)
    return error_over_bound(run(in_tiles(call)), call)


@policies
@pytest.mark.parametrize("out_dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(policy: str, shape: tuple[int, ...], out_dtype: torch.dtype) -> None:
    fields = dict(zip(("experts", "top_k", "hidden", "inter", "tokens"), shape, strict=True))
    assert error_of(policy, **fields, out_dtype=out_dtype) < 1


# The decode kernel's sums are exact but for float32: no farther from the oracle than the prefill kernels' of few bits.
DECODES = {
    policy: Sm90Few.MAX_TOKENS_PACKED if policy.startswith("packed") else Sm90Few.MAX_TOKENS for policy in POLICIES
}
FEW_TOKENS = [
    (policy, tokens) for policy, most in DECODES.items() for tokens in (1, 2, 3, 5, 8, 9, 16) if tokens <= most
]
FEW_SHAPES = ((8, 2, 192, 176), (8, 1, 128, 64), (16, 4, 2688, 1856), (16, 8, 2048, 768), (12, 6, 1152, 1408))


@pytest.mark.parametrize(("policy", "tokens"), FEW_TOKENS)
@pytest.mark.parametrize("shape", FEW_SHAPES, ids=str)
def test_very_few_tokens_on_the_decode_kernel(policy: str, shape: tuple[int, ...], tokens: int) -> None:
    fields = dict(zip(("experts", "top_k", "hidden", "inter"), shape, strict=True))
    call = case(policy, **fields, tokens=tokens, out_dtype=torch.float32)
    out, of_prefill = (run(in_tiles(call), decode_tokens) for decode_tokens in (DECODES[policy], 0))
    print(f"{policy} {shape} {tokens} {relative_error(out, call):.2e} prefill {relative_error(of_prefill, call):.2e}")
    assert error_over_bound(out, call) < 1
    assert relative_error(out, call) <= max(1.2 * relative_error(of_prefill, call), 1e-3)
    assert tokens > 3 or not torch.equal(out, of_prefill)  # beyond, buffers of some do not fit


@pytest.mark.parametrize(
    "scales", ({}, {"a1": 90.0, "a2": 30.0}, {"a2": "expert"}), ids=("dynamic", "static", "expert")
)
@pytest.mark.parametrize("policy", ("packed", "packed-mxfp4"))
@pytest.mark.parametrize("tokens", (1, 2, 8, 16))
def test_few_tokens_meet_the_weights_of_packed(policy: str, tokens: int, scales: dict[str, Any]) -> None:
    """Exact products, sums in float32: as near as their order lets them. Weights as they are would be far."""
    call = case(policy, hidden=512, inter=256, experts=8, tokens=tokens, out_dtype=torch.float32, **scales)
    if call.scheme == "mxfp4":  # weights of GEMM1 that are rounded beside large ones, which meet zeros
        with_scales(call, 119, 120)
        assert call.w13_scale is not None
        call.w13_scale[..., 0], call.w13[..., 0], call.hidden_states[:, :32] = 135, 0x77, 0
    tiled = in_tiles(call)
    out = run(tiled, Sm90Few.MAX_TOKENS_PACKED)
    exact = experts_reference(call, dtype=torch.float64)
    errors = (out.double() - exact).norm(dim=1) / exact.norm(dim=1)
    # Now and then the order of a sum moves a code of the intermediate, and with it a token's row.
    assert (errors < F32).sum() >= tokens - tokens // 8, errors
    assert relative_error(out, call._replace(weight_policy="exact")) > 1e-2
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run(tiled, Sm90Few.MAX_TOKENS_PACKED)
        torch.cuda.synchronize()
    names = [event.key for event in profiled.key_averages() if "moeq::sm90" in event.key]
    assert len(names) == 1 and "decode_few_kernel" in names[0], names


@policies
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("tokens", (1, 6))
def test_activations_on_the_decode_kernel(policy: str, activation: str, tokens: int) -> None:
    call = case(policy, activation=activation, bias=True, inter=176, hidden=256, tokens=tokens, out_dtype=torch.float32)
    assert error_over_bound(run(in_tiles(call), 8), call) < 1


@policies
@pytest.mark.parametrize("tokens", (2, 7))
def test_block_scales_of_every_size_on_the_decode_kernel(policy: str, tokens: int) -> None:
    call = with_scales_of_every_size(case(policy, hidden=512, inter=256, tokens=tokens, out_dtype=torch.float32))
    assert error_over_bound(run(in_tiles(call), 8), call) < 1


@policies
def test_runs_of_the_decode_kernel_are_bitwise_equal(policy: str) -> None:
    tiled = in_tiles(case(policy, hidden=1024, inter=768, experts=16, top_k=4, tokens=8))
    first = run(tiled, 8)
    assert all(torch.equal(run(tiled, 8), first) for _ in range(20))


@policies
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_that_the_tensor_cores_hold_exactly(policy: str, shape: tuple[int, ...]) -> None:
    """Tokens of -1, 0 and 1, weights of GEMM1 of 0 and 6 times one scale a row: sums of few bits."""
    fields = dict(zip(("experts", "top_k", "hidden", "inter", "tokens"), shape, strict=True))
    call = case(policy, **fields, out_dtype=torch.float32)
    g = torch.Generator().manual_seed(2)
    call.hidden_states.copy_(torch.randint(-1, 2, call.hidden_states.shape, generator=g))
    nibbles = torch.tensor([0, 7, 8, 15], dtype=torch.uint8)[torch.randint(0, 4, (*call.w13.shape, 2), generator=g)]
    call.w13.copy_(nibbles[..., 0] | nibbles[..., 1] << 4)
    assert call.w13_scale is not None
    call.w13_scale.copy_(call.w13_scale[..., :1].expand_as(call.w13_scale).clone())
    assert relative_error(run(in_tiles(call)), call) < FP8_SUMS_EXACT


@policies
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("tokens", (40, 300))  # narrow tiles of 4-bit weights, and others
def test_activations(policy: str, activation: str, bias: bool, tokens: int) -> None:
    fields = {"activation": activation, "bias": bias, "inter": 176, "hidden": 256, "tokens": tokens}
    assert error_of(policy, **fields, out_dtype=torch.float32) < 1


@policies
@pytest.mark.parametrize("inter", (4096, 14080))
def test_long_rows_that_are_activated_when_they_are_quantized(policy: str, inter: int) -> None:
    """Gate and up in float32: of 4096 a block holds three rows, of 14080 it cannot hold two."""
    assert error_of(policy, activation="gelu", inter=inter, tokens=30, out_dtype=torch.float32) < 1


@policies
@pytest.mark.parametrize("tokens", (1, 9, 100))
def test_foreign_ids_contribute_nothing(policy: str, tokens: int) -> None:
    call = case(policy, tokens=tokens, top_k=3, foreign=True)
    call.topk_ids[0, 1] = -(2**31)
    call.topk_ids[tokens // 2, 2] = 2**31 - 1
    out = run(in_tiles(call))
    assert not out[-1].any()  # every expert of the last token is foreign
    if tokens > 1:
        assert error_over_bound(out, call._replace(topk_weights=call.topk_weights.nan_to_num(1.0))) < 1


@policies
def test_duplicate_ids_and_skew(policy: str) -> None:
    call = case(policy, experts=40, tokens=260, top_k=3, hidden=256)
    call.topk_ids[:] = 37
    call.topk_ids[::7, 1] = 3
    assert error_over_bound(run(in_tiles(call)), call) < 1


@policies
def test_as_many_tiles_as_few_tokens_can_need(policy: str) -> None:
    """Tiles of 72 tokens: 721 of an expert are 12 of up to 64, one more than tiles of 72 would be."""
    call = case(policy, experts=128, tokens=1112, top_k=4, hidden=256)
    experts = torch.arange(128, dtype=torch.int32)
    counts = torch.where(experts < 6, 721, 1)
    call.topk_ids[:] = experts.repeat_interleave(counts).view(4, 1112).t().to(call.topk_ids)
    assert error_over_bound(run(in_tiles(call)), call) < 1


@policies
def test_router_weight_on_input_and_alphas_of_halves(policy: str) -> None:
    assert error_of(policy, top_k=1, router_weight_on_input=True, per_half=True, tokens=50) < 1


@policies
def test_runs_are_bitwise_equal(policy: str) -> None:
    tiled = in_tiles(case(policy, hidden=1024, inter=320, experts=16, top_k=4, tokens=500))
    first = run(tiled)
    for _ in range(5):
        assert torch.equal(run(tiled), first)


@pytest.mark.parametrize("scheme", ("", "-mxfp4"))
@pytest.mark.parametrize("tokens", (7, 200))
def test_both_policies_give_the_same_bits(scheme: str, tokens: int) -> None:
    """They are the same numbers in the same order of sums."""
    both = (in_tiles(case(p + scheme, hidden=512, inter=320, tokens=tokens)) for p in ("packed", "folded"))
    assert torch.equal(*(run(tiled) for tiled in both))


# Tokens of an expert: each width that its tiles can have, and a few tiles.
TOKENS_OF_WIDTHS = (*range(7, 97, 16), *range(97, 161, 8), *range(161, 257, 16), 300, 460, 700)
# Experts whose main loops know their widths. K of one step, of two, three and many.
LARGE_EXPERTS = ((128, 32768), (16384, 256), (384, 10944), (1024, 4096))


@pytest.mark.parametrize("scheme", ("", "-mxfp4"))
@pytest.mark.parametrize(("hidden", "inter"), LARGE_EXPERTS)
@pytest.mark.parametrize("others", (100, 400))  # tiles of up to 160 tokens, and of up to 256
def test_tiles_of_every_width_give_the_bits_of_folded(scheme: str, hidden: int, inter: int, others: int) -> None:
    fields = {"experts": 2, "top_k": 1, "hidden": hidden, "inter": inter, "tokens": 700 + others}
    both = [in_tiles(case(policy + scheme, **fields)) for policy in ("packed", "folded")]
    for tokens in TOKENS_OF_WIDTHS:
        first = slice(tokens + others)
        ids = torch.ones_like(both[0].topk_ids[first])
        ids[:tokens] = 0
        outs = (
            run(
                tiled._replace(
                    hidden_states=tiled.hidden_states[first], topk_ids=ids, topk_weights=tiled.topk_weights[first]
                )
            )
            for tiled in both
        )
        assert torch.equal(*outs), tokens


@pytest.mark.parametrize("scheme", ("", "-mxfp4"))
@pytest.mark.parametrize(("hidden", "inter"), ((2880, 704), (2880, 1856), (2880, 2880)))
def test_a_hot_expert_beside_empty_ones_gives_the_bits_of_folded(scheme: str, hidden: int, inter: int) -> None:
    """Tiles of an expert one behind another, and rows of weights that are no whole blocks."""
    outs = []
    for policy in ("packed", "folded"):
        call = case(policy + scheme, experts=6, top_k=2, hidden=hidden, inter=inter, tokens=300)
        call.topk_ids[:, 0], call.topk_ids[:, 1] = 4, 1
        call.topk_ids[:130, 1] = 2
        outs.append(run(in_tiles(call)))
    assert torch.equal(*outs)


@pytest.mark.parametrize("policy", ("packed-mxfp4", "folded-mxfp4"))
@pytest.mark.parametrize("tokens", (3, 60))
@pytest.mark.parametrize(("first", "exact"), ((107, True), (106, False)))
def test_mxfp4_is_exact_as_far_as_e4m3_reaches(policy: str, tokens: int, first: int, exact: bool) -> None:
    """Beside scales of 2^-6 and codes of 4 and 6, which leave x = -12, half of a scale of 2^-20 is the smallest subnormal
    of e4m3, half of 2^-21 is not one."""
    call = case(policy, hidden=512, inter=256, experts=8, tokens=tokens, out_dtype=torch.float32)
    for weight, scale in ((call.w13, call.w13_scale), (call.w2, call.w2_scale)):
        assert scale is not None
        scale.fill_(first)
        scale[..., 0], weight[..., 0] = 121, 0x67
        weight[..., 16:] = 0x19  # codes 0.5 and -0.5
    of_packed, of_exact = (
        experts_reference(call._replace(weight_policy=name), dtype=torch.float64) for name in ("packed", "exact")
    )
    assert torch.equal(of_packed, of_exact) == exact
    assert error_over_bound(run(in_tiles(call), 8), call) < 1


@policies
def test_a_nan_row_disturbs_no_other(policy: str) -> None:
    tiled = in_tiles(case(policy, tokens=6))
    clean = run(tiled)
    tiled.hidden_states[3] = float("nan")
    assert torch.equal(run(tiled)[[0, 1, 2, 4, 5]], clean[[0, 1, 2, 4, 5]])


@policies
def test_rows_of_zeros_and_of_tiny_values(policy: str) -> None:
    """Their scales are 1, and next to nothing; no code is a NaN."""
    call = case(policy, tokens=8, out_dtype=torch.float32)
    call.hidden_states[2] = 0.0
    call.hidden_states[5] *= 1e-37
    out = run(in_tiles(call))
    assert torch.isfinite(out).all() and not out[2].any()
    assert error_over_bound(out, call) < 1


@policies
def test_block_scales_of_every_size(policy: str) -> None:
    """Rows whose blocks differ by up to 2^17 (MXFP4: 2^30), so that products are subnormal in e4m3 or vanish."""
    call = with_scales_of_every_size(case(policy, hidden=512, inter=256, tokens=60, out_dtype=torch.float32))
    assert error_over_bound(run(in_tiles(call)), call) < 1
