"""Float16 hidden states on `cuda_sm90`, each as the sum of two bfloat16 or as it is, against the oracle, which rounds the
intermediate to float16. On a GPU of compute capability 9.0."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from gpu_layers import FORMATS, Format
from in_graph import LAYER, judge, make_pair, replay_pair
from in_graph_cells import FORMS
from sm90_cases import in_tiles, make_call, relative_error, run_on, why_not_here
from tolerances import bound, layer_bound, relative_l2

import torch_moe_ops as moe
from torch_moe_ops.backends import cuda_sm90
from torch_moe_ops.backends.sm90.common import NO_ROUTER
from torch_moe_ops.core.call import ExpertsCall, for_kernels
from torch_moe_ops.core.kernel_facts import own_of
from torch_moe_ops.oracle.reference import experts_reference

REASON = why_not_here()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(REASON), reason=REASON or "it is there")]

F16, F32 = torch.float16, torch.float32
# Scheme and activation format.
PLAIN = (
    ("nvfp4", "none"),
    ("mxfp4", "none"),
    ("fp8", "none"),
    ("fp8_block", "none"),
    ("mxfp8", "none"),
    ("int8", "none"),
)
ROUNDED = (
    ("nvfp4", "nvfp4"), ("nvfp4", "fp8"), ("mxfp4", "fp8"), ("mxfp4", "mxfp8"), ("fp8", "fp8"), ("fp8_block", "fp8"),
    ("mxfp8", "mxfp8"),
)  # fmt: skip
KERNELS = ("decode", "slim", "narrow", "wide")
kernels = pytest.mark.parametrize("kernel", KERNELS)
every = pytest.mark.parametrize(("scheme", "act_format"), PLAIN + ROUNDED)
plain = pytest.mark.parametrize(("scheme", "act_format"), PLAIN)
# experts, top_k, hidden, inter, tokens. Hidden sizes of whole tiles, and of half a tile more.
SHAPES = (
    (8, 1, 128, 64, 3),
    (8, 2, 96, 176, 20),
    (8, 2, 224, 160, 5),
    (16, 4, 2880, 704, 9),
    (16, 4, 2720, 1856, 40),
    (128, 8, 2048, 768, 64),
    (8, 2, 4096, 7168, 8),
    (512, 22, 1024, 128, 17),
    (32, 8, 512, 256, 96),
    (32, 8, 512, 256, 97),
    (4, 2, 4096, 1024, 300),
    (2, 1, 512, 256, 1100),
)
# Relative L2 of float32 results of kernels that round nothing but the intermediate, to float16: another order of float32
# sums. A value beside a tie of its rounding comes on top (`layer_bound`).
BOUND = 5e-5


def case(scheme: str, act_format: str, **fields: Any) -> ExpertsCall:
    if scheme == "int8":
        fields["weights"] = {"group": -1}
    return make_call(scheme, act_format, **{"hidden": 128, "inter": 64, "dtype": F16, "out_dtype": F32} | fields)


def limit(call: ExpertsCall) -> float:
    values = call.topk_ids.numel() * call.w2.shape[2]
    return max(BOUND, layer_bound("cuda_sm90", call.act_format, call.out_dtype, values, call.activation))


def check(kernel: str, call: ExpertsCall) -> None:
    error = relative_error(run_on(kernel, in_tiles(call)), call)
    print(f"{call.scheme} {call.act_format} {kernel} {tuple(call.w2.shape)} {call.activation} {error:.2e}")
    assert error < limit(call), kernel


@every
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(scheme: str, act_format: str, shape: tuple[int, ...]) -> None:
    """Every kernel and dtype of results against one result of the oracle."""
    fields = dict(zip(("experts", "top_k", "hidden", "inter", "tokens"), shape, strict=True))
    if scheme.startswith("mx"):
        fields["inter"] = -(-fields["inter"] // 32) * 32
    calls = [case(scheme, act_format, **fields, out_dtype=dtype) for dtype in (F32, F16, torch.bfloat16)]
    exact = experts_reference(calls[0], dtype=torch.float64)
    for call in calls:
        want = exact.to(call.out_dtype).double()
        for kernel in KERNELS:
            error = relative_l2(run_on(kernel, in_tiles(call)), want)
            print(f"{scheme} {act_format} {kernel} {shape} {call.out_dtype} {error:.2e} of {limit(call):.2e}")
            assert error < limit(call), (kernel, call.out_dtype)


@pytest.mark.parametrize("tokens", range(1, 17))
@every
def test_few_tokens(scheme: str, act_format: str, tokens: int) -> None:
    check("decode", case(scheme, act_format, experts=32, top_k=4, hidden=1024, inter=384, tokens=tokens))
    if tokens > 3:  # of fewer, nobody has an expert here
        fields: dict[str, Any] = {"experts": 3, "top_k": 2, "hidden": 288, "inter": 192, "foreign": True}
        check("decode", case(scheme, act_format, tokens=tokens, **fields))


@kernels
@every
@pytest.mark.parametrize(
    "activation", ("silu", "gelu", "swigluoai", "situ", "relu2_no_mul", "silu_no_mul", "identity_no_mul")
)
def test_activations(scheme: str, act_format: str, activation: str, kernel: str) -> None:
    for tokens in (5, 40, 60):  # of NVFP4, narrow and wide tiles multiply float16 as it is from 49 on
        check(kernel, case(scheme, act_format, activation=activation, bias=True, inter=160, hidden=288, tokens=tokens))


@kernels
@every
def test_weight_on_input(scheme: str, act_format: str, kernel: str) -> None:
    """The product with the router weight is rounded to float16."""
    for tokens in (4, 50, 120):
        fields: dict[str, Any] = {"top_k": 1, "router_weight_on_input": True, "hidden": 320, "inter": 192}
        check(kernel, case(scheme, act_format, tokens=tokens, **fields))


@kernels
@pytest.mark.parametrize(
    ("scheme", "act_format", "scales"),
    (
        ("nvfp4", "nvfp4", {"a1": 300.0, "a2": 200.0}), ("nvfp4", "nvfp4", {"a1": "expert", "a2": "expert"}),
        ("nvfp4", "nvfp4", {"a1": 300.0}), ("nvfp4", "nvfp4", {"a2": "expert"}),
        ("nvfp4", "fp8", {"a1": 90.0, "a2": 30.0}), ("fp8", "fp8", {"a1": "expert", "a2": "expert"}),
    ),
)  # fmt: skip
def test_given_scales(scheme: str, act_format: str, scales: dict[str, Any], kernel: str) -> None:
    for tokens in (2, 7, 60):
        check(kernel, case(scheme, act_format, inter=320, hidden=512, tokens=tokens, **scales))


@kernels
@plain
def test_no_bit_of_a_hidden_state_is_lost(scheme: str, act_format: str, kernel: str) -> None:
    """Hidden states of one value each, of every size, subnormal and largest ones: results are products."""
    call = case(scheme, act_format, tokens=64, hidden=256, inter=64, activation="identity_no_mul", top_k=1, experts=2)
    g = torch.Generator().manual_seed(3)
    bits = torch.randint(0, 0x7C00, (64,), generator=g, dtype=torch.int16)
    bits[:4] = torch.tensor([1, 0x3FF, 0x400, 0x7BFF], dtype=torch.int16)
    x = torch.zeros(64, 256, dtype=F16)
    x[torch.arange(64), torch.randint(256, (64,), generator=g)] = bits.view(F16)
    call = call._replace(hidden_states=x.to(call.w2.device))
    tokens = 8 if kernel == "decode" else 64
    call = call._replace(**{n: getattr(call, n)[:tokens] for n in ("hidden_states", "topk_ids", "topk_weights")})
    want, got = experts_reference(call, dtype=torch.float64), run_on(kernel, in_tiles(call)).double()
    # An intermediate beyond float16 is infinite in both.
    assert torch.equal(got.isfinite(), want.isfinite())
    for row, (mine, exact) in enumerate(zip(got, want, strict=True)):
        if exact.isfinite().all() and exact.any():
            error = relative_l2(mine, exact)
            assert error < layer_bound("cuda_sm90", "none", F32, call.w2.shape[2]), (row, float(x[row].max()), error)


@kernels
def test_exponents_that_no_float16_holds(kernel: str) -> None:
    """MXFP4 scales that differ by 2^28 in one row, and rows of w13 far below what float16 holds."""
    for tokens in (4, 60):
        call = case("mxfp4", "none", tokens=tokens, hidden=512, inter=256, activation="identity_no_mul")
        for scale, shift in ((call.w13_scale, -16), (call.w2_scale, 16)):
            assert scale is not None
            powers = torch.randint(-14, 15, scale.shape, generator=torch.Generator().manual_seed(1)) + shift
            scale.copy_((scale.int().cpu() + powers).clamp(0, 160).to(scale))
        check(kernel, call)


@every
def test_rows_that_are_not_finite(scheme: str, act_format: str) -> None:
    """NaN and infinities stay in their rows; other rows keep their bits."""
    for tokens in (6, 70, 400):
        call = case(scheme, act_format, tokens=tokens, hidden=256, inter=128)
        tiled = in_tiles(call)
        clean = moe_of(tiled)
        x = call.hidden_states.clone()
        x[1, 7], x[3, 200], x[4] = math.nan, -math.inf, 65504.0
        got, want = moe_of(tiled._replace(hidden_states=x)), experts_reference(call._replace(hidden_states=x))
        others = [row for row in range(tokens) if row not in (1, 3, 4)]
        assert torch.equal(got[others], clean[others])
        assert not got[1].isfinite().any() and not want[1].isfinite().any()
        assert torch.equal(got.isfinite(), want.isfinite())


def moe_of(tiled: ExpertsCall) -> torch.Tensor:
    """As the backend runs it, on the kernel that it chooses."""
    out = torch.full_like(tiled.hidden_states, math.nan, dtype=tiled.out_dtype)
    cuda_sm90.run(tiled, out)
    return out


@plain
def test_bfloat16_values_are_the_same_in_float16(scheme: str, act_format: str) -> None:
    """Hidden states that both dtypes hold: no further apart than one rounding of the intermediate to bfloat16."""
    call = case(scheme, act_format, tokens=80, hidden=512, inter=128, activation="relu2_no_mul")
    x = call.hidden_states.bfloat16()
    kept = x.half().bfloat16() == x
    x = torch.where(kept, x, torch.zeros_like(x))
    for kernel in KERNELS:
        half, wide = (run_on(kernel, in_tiles(call._replace(hidden_states=x.to(d)))) for d in (F16, torch.bfloat16))
        assert relative_l2(half, wide) < bound(torch.bfloat16)


_IN_GRAPH = [f for f in FORMATS if f.backend == "cuda_sm90" and f.input_scale == "none"]


@pytest.mark.parametrize("tokens", (1, 2, 5, 40, 400))
@pytest.mark.parametrize("fmt", _IN_GRAPH, ids=str, scope="module")
def test_in_graphs(fmt: Format, tokens: int) -> None:
    """Two layers in a captured graph, behind a router's GEMM, another layer, or a kernel that lets them start early."""
    pair = make_pair(fmt, dataclasses.replace(LAYER, dtype=F16))
    for form in FORMS:
        for front in ("gemm", "layer", "early"):
            verdict = judge(pair, fmt, form, replay_pair(pair, tokens, form, front, replays=6))
            assert verdict.passed, (form, front, verdict)


def test_auto_takes_it() -> None:
    g = torch.Generator().manual_seed(0)
    w13, w2 = torch.randn(8, 256, 96, generator=g) / 10, torch.randn(8, 96, 128, generator=g) / 11
    raw = moe.quantize_experts(w13.half(), w2.half(), "nvfp4").to("cuda")
    w = moe.prepare(raw, act_format="none", dtype=F16)
    assert w.backend == "cuda_sm90"
    reference = moe.prepare(raw, act_format="none", backend="reference")
    for tokens in (0, 1, 9, 100):
        x = torch.randn(tokens, 96, generator=g).half().cuda()
        logits = torch.randn(tokens, 8, generator=g).half().cuda()
        routing = moe.Routing("renormalize", 2)
        got, want = (moe.fused_moe(x, logits, layer, routing=routing) for layer in (w, reference))
        assert got.dtype == F16 and got.shape == x.shape
        assert tokens == 0 or relative_l2(got, want) < layer_bound("cuda_sm90", "none", F16, tokens * 2 * 128)


@pytest.mark.parametrize(("mine", "others"), ((96, 128), (128, 96), (160, 192)))
def test_another_hidden_size_in_as_many_tiles(mine: int, others: int) -> None:
    """Which the shapes of the weights do not show."""
    raw = moe.quantize_experts(torch.randn(4, 128, mine).bfloat16(), torch.randn(4, mine, 64).bfloat16(), "nvfp4")
    w = moe.prepare(raw.to("cuda"), act_format="none", backend="cuda_sm90")
    x, ids, weights = torch.randn(3, others).bfloat16().cuda(), torch.zeros(3, 1).int().cuda(), torch.ones(3, 1).cuda()
    routing = moe.Routing("renormalize", 1)
    for call in (
        lambda: moe.fused_moe_routed(x, ids, weights, w),
        lambda: moe.fused_moe(x, torch.randn(3, 4).cuda(), w, routing=routing),
        lambda: moe.fused_moe_routed(x[None], ids[None], weights[None], w),
    ):
        with pytest.raises(RuntimeError, match=f"hidden_states must have hidden_size {mine}, got {others}"):
            call()


def test_one_gemm_alone_cannot_be_quantized() -> None:
    tiled = in_tiles(case("nvfp4", "none", tokens=4))
    own = {"act_format": "nvfp4", "quantize_hidden": False, "quantize_intermediate": True, "kernel": 1}
    out = torch.empty_like(tiled.hidden_states)
    with pytest.raises(RuntimeError, match="both GEMMs' activations must be quantized, or neither"):
        torch.ops.moeq_C.experts_sm90(out, *for_kernels(tiled), *NO_ROUTER, *own_of["experts_sm90"](own))
