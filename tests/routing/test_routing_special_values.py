"""Ties, NaN and infinities in router logits."""

from __future__ import annotations

import math

import pytest
import torch
from routing_oracle import SOFTMAX, SUM_IS_ONE, WITH_BIAS, draw, draw_bias, top_ks

from torch_moe_ops.core.routing_methods import ROUTING_METHODS
from torch_moe_ops.routing.reference import route_reference


@pytest.mark.parametrize("method", ROUTING_METHODS)
def test_ties_go_to_the_lowest_index(method: str) -> None:
    for num_experts in (8, 60, 2048):
        k = min(top_ks(method, num_experts)[-1], num_experts)
        ids, _ = route_reference(torch.zeros(3, num_experts), None, method, k)
        assert ids.tolist() == [list(range(k))] * 3
    k = top_ks(method, 8)[-1] if method == "llama4" else 4
    logits = torch.tensor([[1.0, 3.0, -0.0, 3.0, 0.0, 1.0, -0.0, -2.0]])
    assert route_reference(logits, None, method, k)[0].tolist() == [[1, 3, 0, 5][:k]]
    if k > 1:
        assert route_reference(logits, None, method, 8)[0].tolist() == [[1, 3, 0, 5, 2, 4, 6, 7]]


def test_ties_between_groups_go_to_the_lowest_group() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0, 0.0]])
    assert route_reference(logits, torch.zeros(6), "deepseek_v3", 4, 3, 2)[0].tolist() == [[1, 2, 0, 3]]


def test_sigmoid_saturates_and_topk_sigmoid_does_not() -> None:
    logits = torch.tensor([[20.0, 30.0, 25.0]])
    assert route_reference(logits, None, "sigmoid", 2)[0].tolist() == [[0, 1]]
    assert route_reference(logits, None, "topk_sigmoid", 2)[0].tolist() == [[1, 2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", ROUTING_METHODS)
def test_rows_of_nan(method: str, dtype: torch.dtype) -> None:
    k = top_ks(method, 60)[-1]
    groups = (4, 3) if method in (*SOFTMAX, "deepseek_v3") else (0, 0)
    for bias in (None, draw_bias(60, seed=1)) if method in WITH_BIAS else (None,):
        for n_group, topk_group in {(0, 0), groups}:
            logits = torch.full((2, 60), math.nan)
            ids, weights = route_reference(logits, bias, method, k, n_group, topk_group, dtype=dtype)
            assert ids.tolist() == [list(range(k))] * 2
            assert torch.equal(weights, torch.zeros(2, k, dtype=dtype))


@pytest.mark.parametrize("method", ROUTING_METHODS)
def test_nan_logits_are_as_if_absent(method: str) -> None:
    logits = draw(6, 40, seed=9)
    bias = draw_bias(40, seed=4) if method in WITH_BIAS else None
    poisoned = torch.tensor([0, 3, 17, 39])
    healthy = torch.tensor([e for e in range(40) if e not in poisoned.tolist()])
    logits[:, poisoned] = math.nan
    k = 1 if method == "llama4" else 8
    ids, weights = route_reference(logits, bias, method, k)
    want_ids, want = route_reference(logits[:, healthy], None if bias is None else bias[healthy], method, k)
    assert ids.tolist() == healthy[want_ids.long()].tolist()
    torch.testing.assert_close(weights, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("method", [m for m in ROUTING_METHODS if m != "llama4"])
def test_nan_is_chosen_last_even_after_minus_infinity(method: str) -> None:
    logits = torch.tensor([[math.nan, -math.inf, 1.0, math.nan, -300.0, 2.0]])
    for dtype in (torch.float32, torch.float64):
        ids, weights = route_reference(logits, None, method, 6, dtype=dtype)
        # Scores of -inf and -300 are both 0 for most methods: a tie.
        minus = [1, 4] if ids.tolist()[0][2] == 1 else [4, 1]
        assert ids.tolist() == [[5, 2, *minus, 0, 3]]
        assert torch.equal(weights[0, 4:], torch.zeros(2, dtype=dtype))
        assert not weights.isnan().any()


def test_experts_outside_the_groups_come_after_nan() -> None:
    logits = torch.tensor([[5.0, 5.0, math.nan, 6.0, 6.0, 6.0]])
    ids, weights = route_reference(logits, None, "default", 3, 2, 1)
    assert ids.tolist() == [[3, 4, 5]]
    logits = torch.tensor([[5.0, 5.0, 7.0, math.nan, 6.0, math.nan]])
    ids, weights = route_reference(logits, None, "renormalize", 2, 3, 1)
    assert ids.tolist() == [[2, 3]] and weights.tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("method", SUM_IS_ONE)
def test_plus_infinity_takes_or_shares_the_mass(method: str) -> None:
    unbounded = method in (*SOFTMAX, "deepseek_v4")  # sigmoid(+inf) is just 1
    logits = torch.tensor([[1.0, math.inf, 3.0, 2.0], [math.inf, 0.0, 1.0, math.inf]])
    ids, weights = route_reference(logits, None, method, 2)
    second = 0 if method == "renormalize_naive" else 2  # all others have no mass left: a tie
    assert ids.tolist() == [[1, second], [0, 3]]
    sigmoid3 = 1.0 / (1.0 + math.exp(-3.0))
    first = [1.0, 0.0] if unbounded else [1.0 / (1.0 + sigmoid3), sigmoid3 / (1.0 + sigmoid3)]
    torch.testing.assert_close(weights, torch.tensor([first, [0.5, 0.5]]), rtol=1e-6, atol=0)


def test_default_with_infinities() -> None:
    logits = torch.tensor([[1.0, math.inf, -math.inf, 2.0], [-math.inf] * 4])
    ids, weights = route_reference(logits, None, "default", 2)
    assert ids.tolist() == [[1, 0], [0, 1]]
    assert weights.tolist() == [[1.0, 0.0], [0.25, 0.25]]


@pytest.mark.parametrize("method", ROUTING_METHODS)
def test_hostile_logits_give_distinct_valid_ids(method: str) -> None:
    generator = torch.Generator().manual_seed(0)
    pool = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 3e38, -3e38, 1e-45, 1.0])
    for num_experts in (2, 8, 60):
        logits = pool[torch.randint(len(pool), (64, num_experts), generator=generator)]
        for top_k in top_ks(method, num_experts):
            ids, weights = route_reference(logits, None, method, top_k)
            assert ids.min() >= 0 and ids.max() < num_experts
            assert (ids.sort(-1).values.diff(dim=-1) > 0).all()
            assert not weights.isnan().any()
            assert method == "topk" or (weights.isfinite().all() and (weights >= 0).all())


def test_nan_counts_as_minus_infinity_in_its_group() -> None:
    logits = torch.tensor([[math.nan, -3.0, -2.0, -1.0], [math.nan, 5.0, 1.0, 2.0]])
    for dtype in (torch.float32, torch.float64):
        assert route_reference(logits, None, "renormalize", 1, 2, 1, dtype=dtype)[0].tolist() == [[3], [1]]
