"""moeq::route's arithmetic: against routers of transformers (stored) and numpy float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from paths import DATA
from routing_oracle import SOFTMAX, WITH_BIAS, WITH_FACTOR, draw, draw_bias, route_row, top_ks
from safetensors.torch import load_file
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from torch_moe_ops.core.routing_methods import ROUTING_METHODS
from torch_moe_ops.routing.reference import route_reference

FIXTURES = load_file(DATA / "routing.safetensors")
CASES = sorted({name.rsplit("/", 1)[0] for name in FIXTURES})
# Stored router -> the methods that must agree with it.
METHODS_OF = {
    "qwen3": ("renormalize", "renormalize_naive"),
    "qwen3_nonorm": ("default",),
    "mixtral": ("renormalize", "renormalize_naive"),
    "gpt_oss": ("renormalize", "renormalize_naive"),
    "llama4": ("llama4", "topk_sigmoid"),
    "deepseek_v3": ("deepseek_v3",),
    "glm4_moe": ("deepseek_v3",),
    "minimax_m2": ("minimax2",),
}
NUM_EXPERTS = (1, 2, 8, 60, 128, 160, 256, 384, 512, 896, 2048)
F32_GAP = 1e-6  # float32 scores below 2 may order two neighbours differently where the gap is smaller


def assert_matches_oracle(
    logits: Tensor,
    bias: Tensor | None,
    method: str,
    top_k: int,
    n_group: int = 0,
    topk_group: int = 0,
    factor: float = 1.0,
    renormalize: bool | None = None,
) -> None:
    arguments = (logits, bias, method, top_k, n_group, topk_group, factor, renormalize)
    ids, weights = route_reference(*arguments)
    ids64, weights64 = route_reference(*arguments, dtype=torch.float64)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32 and weights64.dtype == torch.float64
    bias64 = None if bias is None else bias.double().numpy()
    compared = 0
    for row, z in enumerate(logits.double().numpy()):
        want_ids, want, gap = route_row(method, z, top_k, bias64, n_group, topk_group, factor, renormalize)
        assert ids64[row].tolist() == want_ids
        np.testing.assert_allclose(weights64[row].numpy(), want, rtol=1e-12)
        if gap > F32_GAP:
            compared += 1
            assert ids[row].tolist() == want_ids
            np.testing.assert_allclose(weights[row].numpy(), want, rtol=3e-6, atol=1e-7)
    assert compared * 2 >= len(logits)


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_stored_routers(case: str) -> None:
    tensors = {name.rsplit("/", 1)[1]: t for name, t in FIXTURES.items() if name.startswith(case + "/")}
    kind, sizes = case.split("/")[:2]
    _, top_k, n_group, topk_group = (int(part.strip("Ektg")) for part in sizes.split("_"))
    want_ids, order = tensors["topk_ids"].sort(-1)
    want = tensors["topk_weights"].gather(1, order)
    for method in METHODS_OF[kind]:
        has_bias = method in WITH_BIAS
        bias = tensors["e_score_correction_bias"] if has_bias else None
        factor = tensors["routed_scaling_factor"].item() if has_bias else 1.0
        ids, weights = route_reference(tensors["router_logits"], bias, method, top_k, n_group, topk_group, factor)
        # The biased routers promise no order, and bfloat16 logits tie inside a row's choice.
        if not has_bias and tensors["router_logits"].dtype == torch.float32:
            assert ids.tolist() == tensors["topk_ids"].tolist()
        got_ids, order = ids.sort(-1)
        assert got_ids.tolist() == want_ids.tolist()
        if want.dtype == torch.bfloat16:
            # gpt-oss computes its softmax in bfloat16, the others round once.
            rtol = 2**-6 if kind == "gpt_oss" else 2**-8
            torch.testing.assert_close(weights.gather(1, order), want.float(), rtol=rtol, atol=0)
        else:
            torch.testing.assert_close(weights.gather(1, order), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num_experts", NUM_EXPERTS)
@pytest.mark.parametrize("method", ROUTING_METHODS)
def test_agrees_with_float64(method: str, num_experts: int) -> None:
    logits = draw(4, num_experts, seed=num_experts)
    bias = draw_bias(num_experts, seed=7) if method in WITH_BIAS else None
    factor = 2.5 if method in WITH_FACTOR else 1.0
    for top_k in top_ks(method, num_experts):
        assert_matches_oracle(logits, bias, method, top_k, factor=factor)


@pytest.mark.parametrize("shift", [0.0, -5.0], ids=["around zero", "all choice scores negative"])
@pytest.mark.parametrize(
    ("num_experts", "n_group", "topk_group", "top_k"),
    [(256, 8, 4, 8), (160, 8, 3, 6), (16, 4, 2, 4), (8, 4, 1, 2), (384, 1, 1, 8), (512, 8, 1, 22), (12, 2, 2, 12)],
)
def test_groups_of_deepseek_v3(num_experts: int, n_group: int, topk_group: int, top_k: int, shift: float) -> None:
    logits = draw(16, num_experts, seed=top_k)
    for bias in (draw_bias(num_experts, seed=3, shift=shift), None):
        assert_matches_oracle(logits, bias, "deepseek_v3", top_k, n_group, topk_group, factor=2.5)


@pytest.mark.parametrize("method", SOFTMAX)
def test_groups_of_softmax_routers_are_ranked_by_their_maximum(method: str) -> None:
    factor = 16.0 if method == "default" else 1.0
    assert_matches_oracle(draw(16, 160, seed=1), None, method, 6, 8, 3, factor=factor)
    # Group 0 has the higher sum of two, group 1 the higher maximum.
    ids, _ = route_reference(torch.tensor([[2.0, 2.0, 3.0, -9.0]]), None, method, 2, 2, 1)
    assert ids.tolist() == [[2, 3]]


def test_excluded_groups_never_win_although_all_others_are_negative() -> None:
    bias = torch.tensor([-8.0, -9.0, -1.0, -20.0, -2.0, -2.0])
    ids, weights = route_reference(torch.zeros(1, 6), bias, "deepseek_v3", 4, 3, 2)
    # Groups by c = 0.5 + b: (-7.5 - 8.5), (-0.5 - 19.5), (-1.5 - 1.5): the second is excluded, with the best expert.
    assert ids.tolist() == [[4, 5, 0, 1]]
    torch.testing.assert_close(weights, torch.full((1, 4), 0.25))


@pytest.mark.parametrize("method", ["default", "renormalize_naive", "sigmoid", "sigmoid_renorm", *WITH_BIAS])
@pytest.mark.parametrize("renormalize", [False, True])
def test_renormalize_overrides_the_method(method: str, renormalize: bool) -> None:
    assert_matches_oracle(draw(8, 60, seed=2), None, method, 6, renormalize=renormalize)


def test_all_negative_logits() -> None:
    for method in ROUTING_METHODS:
        top_k = 1 if method == "llama4" else 8
        assert_matches_oracle(draw(8, 64, seed=5, low=-14.0, high=-8.0) * 0.5, None, method, top_k)


@pytest.mark.parametrize("method", WITH_BIAS)
def test_bias_of_ten_thousand_chooses_but_does_not_weigh(method: str) -> None:
    logits = draw(32, 64, seed=8)
    bias = torch.zeros(64)
    bias[[50, 9]] = 1e4
    ids, weights = route_reference(logits, bias, method, 4)
    assert (ids.sort(-1).values == 50).any(-1).all() and (ids == 9).any(-1).all()
    # All experts: 2^-10 is the spacing of float32 there, well below the distance of these scores.
    assert_matches_oracle(draw(32, 16, seed=8, low=-2.0, high=2.0), torch.full((16,), 1e4), method, 3)
    torch.testing.assert_close(weights.sum(-1), torch.ones(32))
    free = route_reference(logits, None, method, 4)[0]
    assert all(set(got[2:]) <= set(want[:4]) for got, want in zip(ids.tolist(), free.tolist(), strict=True))


@pytest.mark.parametrize("method", ROUTING_METHODS)
def test_low_precision_and_strided_logits_are_routed_in_float32(method: str) -> None:
    top_k = 1 if method == "llama4" else 6
    bias = draw_bias(96, seed=2) if method in WITH_BIAS else None
    for dtype in (torch.bfloat16, torch.float16):
        logits = draw(5, 96, seed=3).to(dtype)
        want = route_reference(logits.float(), bias, method, top_k)
        wide = torch.zeros(5, 192, dtype=dtype)
        wide[:, ::2] = logits
        for same in (logits, wide[:, ::2], logits.t().contiguous().t()):
            got = route_reference(same, bias, method, top_k)
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("method", ROUTING_METHODS)
def test_rows_do_not_depend_on_each_other(method: str) -> None:
    top_k = 1 if method == "llama4" else 4
    logits = draw(7, 64, seed=6)
    ids, weights = route_reference(logits, None, method, top_k)
    empty_ids, empty_weights = route_reference(logits[:0], None, method, top_k)
    assert empty_ids.shape == empty_weights.shape == (0, top_k) and empty_ids.dtype == torch.int32
    for row in range(7):
        one = route_reference(logits[row : row + 1], None, method, top_k)
        assert torch.equal(one[0][0], ids[row]) and torch.equal(one[1][0], weights[row])


def test_inputs_are_not_written() -> None:
    for method in ROUTING_METHODS:
        logits, bias = draw(3, 16, seed=1), draw_bias(16, seed=1)
        before = logits.clone(), bias.clone()
        ids, weights = route_reference(logits, bias if method in WITH_BIAS else None, method, 1)
        ids.fill_(-1)
        weights.fill_(-1)
        assert torch.equal(logits, before[0]) and torch.equal(bias, before[1])


@pytest.mark.parametrize("method", ["renormalize", "deepseek_v3"])
def test_one_trace_serves_every_number_of_tokens(method: str) -> None:
    bias = draw_bias(64, seed=1)
    groups = (4, 2) if method == "deepseek_v3" else (0, 0)

    def run(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return route_reference(logits, bias if method == "deepseek_v3" else None, method, 4, *groups)

    graph = make_fx(run, tracing_mode="symbolic")(draw(5, 64, seed=1), bias)
    for num_tokens in (2, 33):
        logits = draw(num_tokens, 64, seed=num_tokens)
        for got, want in zip(graph(logits, bias), run(logits, bias), strict=True):
            assert torch.equal(got, want)
