"""Every format of every GPU backend against the oracle, at sizes that fit no tile."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from gpu_layers import (
    FORMATS,
    ROUTINGS,
    WIDE,
    Format,
    Sizes,
    as_reference,
    formats,
    make_batch,
    make_raw,
    needs_cuda,
    prepare,
)
from problems import Case
from samples import quantize
from tolerances import BF16, FP8_SUM_BACKENDS, layer_bound, relative_l2, rounded_int4
from triton_weights import of_three_bits

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS

pytestmark = [pytest.mark.gpu, needs_cuda]

# Another order of float32 sums: a sum on the other side of a rounding boundary moves a code of the intermediate.
EMULATED = 2e-3
PLAIN = Sizes(experts=60, top_k=4, hidden=2688, inter=1856, activation="relu2_no_mul", bias=True)
MANY = Sizes(experts=512, top_k=22, hidden=1408, inter=176, activation="gelu_tanh", bias=True, dtype=torch.float16)

ROUNDS_WEIGHTS = "cuda_sm90_int4"
# Up to so many tokens hidden states that the kernels round themselves go to kernels that take no codes.
OTHER_FEW_TOKENS = {"cuda_sm90_packed": 16}

# Where hidden states can come packed: nvfp4 under one gscale, all others with the scales of their tokens.
PACKED = [f for f in FORMATS if f.act_format != "none" and f.input_scale == ("tensor" if f.act_format == "nvfp4" else "none")]  # fmt: skip


def compare(fmt: Format, sizes: Sizes, cases: list[tuple[int, str]], bound: float, dtype: torch.dtype) -> None:
    if sizes.dtype not in BACKENDS[fmt.backend].hidden_dtypes:
        sizes = dataclasses.replace(sizes, dtype=torch.bfloat16)
    if fmt.backend == ROUNDS_WEIGHTS:
        bound = max(bound, rounded_int4(fmt.act_format))
    raw = make_raw(fmt, sizes)
    w = prepare(raw, fmt)
    batches = [make_batch(sizes, w.hidden_size, *case, seed) for seed, case in enumerate(cases)]
    # The oracle takes long for its experts, not for their tokens.
    joined = [torch.cat(tensors) for tensors in zip(*batches, strict=True)]
    wanted = moe.fused_moe_routed(*joined, as_reference(raw, fmt), out_dtype=dtype).split(
        [tokens for tokens, _ in cases]
    )
    for (tokens, routing), batch, want in zip(cases, batches, wanted, strict=True):
        out = moe.fused_moe_routed(*batch, w, out_dtype=dtype)
        assert out.shape == (tokens, w.hidden_size) and out.dtype == dtype
        assert torch.isfinite(out).all(), (tokens, routing)
        error, allowed = relative_l2(out, want), bound
        if fmt.backend in FP8_SUM_BACKENDS or (fmt.backend == ROUNDS_WEIGHTS and fmt.act_format != "none"):
            values = tokens * sizes.top_k * raw.intermediate_size
            allowed = layer_bound(fmt.backend, fmt.act_format, dtype, values)
        assert error < allowed, f"{tokens} tokens, {routing}: {error:.2e}"
        if routing == "foreign" and tokens:
            assert not out[-1].any()


@formats
def test_few_tokens(fmt: Format) -> None:
    compare(
        fmt, WIDE, [(0, "random"), (1, "random"), (1, "one"), (1, "foreign"), (9, "random")], EMULATED, torch.float32
    )


@formats
def test_every_kind_of_routing(fmt: Format) -> None:
    compare(fmt, WIDE, [(300, routing) for routing in ROUTINGS], EMULATED, torch.float32)


@formats
def test_without_gate_to_bfloat16(fmt: Format) -> None:
    compare(fmt, PLAIN, [(17, "skewed"), (17, "foreign")], BF16, torch.bfloat16)


@formats
def test_many_experts(fmt: Format) -> None:
    compare(fmt, MANY, [(33, "random"), (33, "half")], EMULATED, torch.float32)


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.act_format != "none"], ids=str, scope="module")
def test_codes_of_activations_are_exact(fmt: Format) -> None:
    """Experts that are identity matrices: every sum has one term, so that a moved code shows and a sum's order cannot."""
    size = 384
    eye = torch.eye(size, device="cuda", dtype=torch.bfloat16).repeat(3, 1, 1)
    fields = {}
    if fmt.input_scale != "none":
        scale = torch.tensor([0.01, 0.017, 0.003], device="cuda")
        scale = scale[0] if fmt.input_scale == "tensor" else scale
        fields = {"a13_input_scale": scale, "a2_input_scale": scale * 0.9}
    raw = moe.quantize_experts(eye, eye.clone(), fmt.scheme, activation="identity_no_mul", **fields)
    if fmt.backend == ROUNDS_WEIGHTS:
        raw = dataclasses.replace(raw, w13_scale=of_three_bits(raw.w13_scale), w2_scale=of_three_bits(raw.w2_scale))
    w, reference = prepare(raw, fmt), as_reference(raw, fmt)
    x = torch.randn(500, size, device="cuda")
    x *= torch.logspace(-6, 4, 500, device="cuda")[:, None]  # subnormal scales, saturation
    x[::5, 32:96], x[3::7, ::5] = 0.0, -0.0
    x[7] = 0.0
    ids = torch.arange(500, device="cuda", dtype=torch.int32)[:, None] % 3
    for dtype in {torch.bfloat16, torch.float16}.intersection(BACKENDS[fmt.backend].hidden_dtypes):
        batch = (x.clamp(-6e4, 6e4).to(dtype), ids, torch.ones(500, 1, device="cuda"))
        out = moe.fused_moe_routed(*batch, w, out_dtype=torch.float32)
        want = moe.fused_moe_routed(*batch, reference, out_dtype=torch.float32)
        torch.testing.assert_close(out, want, rtol=1e-6, atol=0)


@formats
def test_strided_arguments(fmt: Format) -> None:
    raw = make_raw(fmt, WIDE)
    w = prepare(raw, fmt)
    x, ids, weights = make_batch(WIDE, w.hidden_size, 9)
    wide = torch.zeros(9, 2 * x.shape[1], dtype=x.dtype, device="cuda")
    wide[:, ::2] = x
    strided = (wide[:, ::2], ids.t().contiguous().t(), weights.t().contiguous().t())
    assert not any(t.is_contiguous() for t in strided)
    assert torch.equal(moe.fused_moe_routed(*strided, w), moe.fused_moe_routed(x, ids, weights, w))


@pytest.mark.parametrize("tokens", [9, 40])
@pytest.mark.parametrize("fmt", PACKED, ids=str, scope="module")
def test_packed_hidden_states(fmt: Format, tokens: int) -> None:
    """Codes that the caller made give, bit for bit, what the kernels make of the same hidden states."""
    raw = make_raw(fmt, WIDE)
    w = prepare(raw, fmt)
    x, ids, weights = make_batch(WIDE, w.hidden_size, tokens)
    codes, scale = quantize(x, Case(scheme=fmt.scheme, act_format=fmt.act_format), w.a1_gscale)
    packed = moe.fused_moe_routed(codes, ids, weights, w, hidden_states_scale=scale, out_dtype=torch.float32)
    plain = moe.fused_moe_routed(x, ids, weights, w, out_dtype=torch.float32)
    if fmt.backend in OTHER_FEW_TOKENS and tokens <= OTHER_FEW_TOKENS[fmt.backend]:
        values = tokens * WIDE.top_k * raw.intermediate_size
        assert relative_l2(packed, plain) < 2 * layer_bound(fmt.backend, fmt.act_format, torch.float32, values)
    else:
        assert torch.equal(packed, plain)
