"""e4m3 weights on the decode kernel for very few tokens, on a GPU of compute capability 9.0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sm90_cases import error_over_bound, fp8_in_tiles, make_call, relative_error, why_not_here
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from torch_moe_ops.backends import cuda_sm90_fp8
from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.core.kernel_facts import Sm90Few

REASON = why_not_here()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(REASON), reason=REASON or "it is there")]

# Scheme, scales of weights, of tokens and of the intermediate: dynamic or given
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "block": ("fp8_block", {}),
    "channel": ("fp8", {"weights": {"scales": "channel"}}),
    "half": ("fp8", {"weights": {"scales": "half"}, "a1": 90.0, "a2": 30.0}),
    "tensor": ("fp8", {"weights": {"scales": "tensor"}, "a1": 90.0, "a2": "expert"}),
    "static_tokens": ("fp8", {"weights": {"scales": "channel"}, "a1": 90.0}),
    "static_intermediate": ("fp8", {"weights": {"scales": "half"}, "a2": 30.0}),
}
forms = pytest.mark.parametrize("form", FORMS)
# experts, top_k, hidden, inter: sizes that fill no tile, both, K of an odd number of tiles, one with parts of K
SHAPES = (
    (8, 2, 200, 136),
    (8, 1, 128, 64),
    (16, 4, 2880, 704),
    (12, 6, 1160, 1408),
    (16, 8, 2048, 768),
    (3, 2, 4096, 2048),
    (2, 1, 136, 17408),
)
TOKENS = (1, 2, 3, 5, 8)


def case(form: str, **fields: Any) -> ExpertsCall:
    scheme, own = FORMS[form]
    usual: dict[str, Any] = {"hidden": 256, "inter": 192, "out_dtype": torch.float32}
    return make_call(scheme, "fp8", **usual | own | fields)


def run(tiled: ExpertsCall, decode_tokens: int = Sm90Few.MAX_TOKENS) -> Tensor:
    """The output, from a buffer full of NaN; decode_tokens 0: of the prefill kernels."""
    out = torch.full(tiled.hidden_states.shape, float("nan"), dtype=tiled.out_dtype, device="cuda")
    cuda_sm90_fp8.run_cuda(tiled, out, decode_tokens)
    return out


def kernels(tiled: ExpertsCall, decode_tokens: int = Sm90Few.MAX_TOKENS) -> set[str]:
    """The names of the kernels that a call launches."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run(tiled, decode_tokens)
        torch.cuda.synchronize()
    return {event.key for event in profiled.key_averages()}


def decodes(tiled: ExpertsCall) -> bool:
    return any("decode_few_kernel" in name for name in kernels(tiled))


@forms
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(form: str, shape: tuple[int, ...], tokens: int) -> None:
    """No farther from the oracle than the prefill kernels, whose sums have fewer bits."""
    call = case(form, **dict(zip(("experts", "top_k", "hidden", "inter"), shape, strict=True)), tokens=tokens)
    tiled = fp8_in_tiles(call)
    out, of_prefill = run(tiled), run(tiled, 0)
    print(f"{form} {shape} {tokens} {relative_error(out, call):.2e} prefill {relative_error(of_prefill, call):.2e}")
    assert error_over_bound(out, call) < 1
    assert relative_error(out, call) <= max(1.2 * relative_error(of_prefill, call), 1e-3)


@forms
def test_few_tokens_run_on_it(form: str) -> None:
    assert decodes(fp8_in_tiles(case(form, tokens=8)))
    assert not decodes(fp8_in_tiles(case(form, tokens=9)))
    assert not any("decode_few_kernel" in name for name in kernels(fp8_in_tiles(case(form, tokens=1)), 0))


@forms
@pytest.mark.parametrize("tokens", (16, 40))
def test_more_tokens(form: str, tokens: int) -> None:
    call = case(form, tokens=tokens, experts=16, top_k=4, hidden=520, inter=328)
    assert error_over_bound(run(fp8_in_tiles(call)), call) < 1


@pytest.mark.parametrize("form", ("block", "channel"))
@pytest.mark.parametrize("activation", ("silu", "gelu", "swigluoai", "situ", "relu2_no_mul", "silu_no_mul"))
@pytest.mark.parametrize("tokens", (1, 6))
def test_activations(form: str, activation: str, tokens: int) -> None:
    call = case(form, activation=activation, bias=True, inter=176, hidden=264, tokens=tokens)
    assert error_over_bound(run(fp8_in_tiles(call)), call) < 1


@forms
@pytest.mark.parametrize("tokens", (1, 4))
def test_sixteen_bit_results_and_foreign_ids(form: str, tokens: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        call = case(form, tokens=tokens, out_dtype=dtype)
        assert error_over_bound(run(fp8_in_tiles(call)), call) < 1
    call = case(form, tokens=tokens + 4, experts=8, foreign=True)
    out = run(fp8_in_tiles(call))
    assert not out[-1].any()
    assert error_over_bound(out, call._replace(topk_weights=call.topk_weights.nan_to_num(1.0))) < 1


def test_block_scales_that_differ_widely() -> None:
    call = case("block", hidden=640, inter=512, tokens=3)
    for scale in (call.w13_scale, call.w2_scale):
        assert scale is not None
        scale.mul_(2.0 ** torch.randint(-6, 7, scale.shape, generator=torch.Generator().manual_seed(1)).to(scale))
    assert error_over_bound(run(fp8_in_tiles(call)), call) < 1


@forms
@pytest.mark.parametrize("tokens", (1, 7))
def test_every_code(form: str, tokens: int) -> None:
    call = case(form, tokens=tokens)
    for codes in (call.w13, call.w2):
        every = torch.arange(256, dtype=torch.uint8, device="cuda")
        every = every[(every & 0x7F) != 0x7F]  # not NaN
        picked = torch.randint(0, len(every), codes.shape, generator=torch.Generator().manual_seed(2)).cuda()
        codes.view(torch.uint8).copy_(every[picked])
    assert error_over_bound(run(fp8_in_tiles(call)), call) < 1


@forms
@pytest.mark.parametrize("tokens", (1, 8))
def test_runs_are_bitwise_equal(form: str, tokens: int) -> None:
    tiled = fp8_in_tiles(case(form, hidden=1024, inter=768, experts=16, top_k=4, tokens=tokens))
    first = run(tiled)
    for _ in range(20):
        assert torch.equal(run(tiled), first)


@forms
def test_a_nan_row_disturbs_no_other(form: str) -> None:
    tiled = fp8_in_tiles(case(form, tokens=6))
    clean = run(tiled)
    tiled.hidden_states[3] = float("nan")
    out = run(tiled)
    assert torch.equal(out[[0, 1, 2, 4, 5]], clean[[0, 1, 2, 4, 5]]) and out[3].isnan().all()


@forms
@pytest.mark.parametrize("tokens", (1, 4))
def test_rows_of_zeros(form: str, tokens: int) -> None:
    call = case(form, tokens=tokens)
    call.hidden_states[0] = 0
    out = run(fp8_in_tiles(call))
    assert not out[0].any() and (tokens == 1 or error_over_bound(out, call) < 1)


@forms
@pytest.mark.parametrize("tokens", (1, 2, 8))
def test_behind_a_gemm_in_a_graph(form: str, tokens: int) -> None:
    """Hidden states and weights that the kernel in front makes; replays follow new ones."""
    call = case(form, tokens=tokens, experts=8, top_k=4)
    tiled = fp8_in_tiles(call)
    source = call.hidden_states.clone()
    mix = (torch.eye(256) + torch.randn(256, 256, generator=torch.Generator().manual_seed(3)) / 16).bfloat16().cuda()
    gate = torch.randn(256, 8, generator=torch.Generator().manual_seed(4)).bfloat16().cuda()
    out = torch.empty(source.shape, dtype=torch.float32, device="cuda")

    def step() -> None:
        torch.mm(source, mix, out=tiled.hidden_states)
        values, ids = (tiled.hidden_states @ gate).float().softmax(-1).topk(4)
        tiled.topk_ids.copy_(ids.int())
        torch.add(values, 0, out=tiled.topk_weights)
        cuda_sm90_fp8.run_cuda(tiled, out, Sm90Few.MAX_TOKENS)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in range(4):
        source.copy_(torch.randn(source.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        replayed = out.clone()
        now = call._replace(hidden_states=tiled.hidden_states, topk_ids=tiled.topk_ids, topk_weights=tiled.topk_weights)
        assert error_over_bound(replayed, now) < 1
        step()
        assert torch.equal(out, replayed)
