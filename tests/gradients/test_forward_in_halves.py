"""What a forward pass holds where a backward pass will follow (core/saving.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from problems import Case, make_batch, make_raw
from triton_passes import make_call

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS, cuda_sm90
from torch_moe_ops.core.saving import for_backward, is_for_backward

SMALL = Case(tokens=9, experts=3, top_k=2, hidden=64, inter=64)


@pytest.mark.parametrize("wants", [False, True])
def test_ops_say_that_a_backward_pass_will_follow(wants: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    w = moe.prepare(make_raw(SMALL), act_format="none", backend="reference")
    seen: list[bool] = []
    real = BACKENDS["reference"].run
    assert real is not None
    watched = lambda *given: seen.append(is_for_backward()) or real(*given)  # type: ignore[func-returns-value]  # noqa: E731
    monkeypatch.setitem(BACKENDS["reference"].__dict__, "run", watched)
    x, ids, weights = make_batch(SMALL)
    out = moe.fused_moe_routed(x.requires_grad_(wants), ids, weights, w)
    assert seen == [wants]
    assert out.requires_grad == wants
    assert not is_for_backward()


@pytest.mark.parametrize(
    ("tokens", "least", "expected"), [(600, 512, [512, 88]), (600, 601, [600]), (512, 512, [256] * 2)]
)
def test_tokens_in_halves(tokens: int, least: int, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its own rows, by the kernel that all of them would have had; without a backward pass, all at once."""
    case = Case(tokens=tokens, experts=3, top_k=2, hidden=64, inter=64)
    call, _ = make_call(case, "cuda_sm90")
    runs: list[tuple[Any, torch.Tensor, int]] = []
    monkeypatch.setattr(cuda_sm90, "_LEAST_TOKENS", least)
    monkeypatch.setattr(cuda_sm90, "_kernel", lambda call, out, top_k: out.shape[0])
    monkeypatch.setattr(cuda_sm90, "run_kernel", lambda *given: runs.append(given))
    out = torch.empty(tokens, case.hidden, dtype=torch.bfloat16)
    with for_backward():
        cuda_sm90.run(call, out)
    assert [len(o) for _, o, _ in runs] == expected
    assert {kernel for *_, kernel in runs} == {tokens}
    for name in ("hidden_states", "topk_ids", "topk_weights"):
        assert torch.equal(torch.cat([getattr(of, name) for of, *_ in runs]), getattr(call, name))
    assert all(o.data_ptr() % 16 == 0 for _, o, _ in runs)
    runs.clear()
    cuda_sm90.run(call, out)
    assert [len(o) for _, o, _ in runs] == [tokens]


def test_few_pairs_beside_the_weights_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tokens=4, experts=40, top_k=1, hidden=64, inter=64)
    call, _ = make_call(case, "cuda_sm90")
    monkeypatch.setattr(cuda_sm90, "_LEAST_TOKENS", 1)
    assert not cuda_sm90._holds_much(call, torch.empty(4, case.hidden))
