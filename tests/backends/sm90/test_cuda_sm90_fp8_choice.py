"""Which kernels of the `cuda_sm90_fp8` backend a call gets; nothing runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sm90_cases import fp8_in_tiles
from triton_cases import make_call

import torch_moe_ops as moe
from torch_moe_ops.backends import cuda_sm90, cuda_sm90_fp8, triton
from torch_moe_ops.backends.cuda_sm90_fp8 import (
    EXACT_SLOTS,
    FEW_SLOTS,
    FEW_SLOTS_SMALL,
    LARGE_BYTES,
    by_decode,
    by_exact,
    by_triton,
    exact_tokens,
    tokens_of_decode,
    triton_tokens,
)
from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.tuning.tuned_kernels import KERNELS

PROBLEM = moe.Problem(
    "fp8_block", "fp8", device="cuda", capability=(9, 0), num_experts=128, top_k=8, hidden_size=2048,
    intermediate_size=768,
)  # fmt: skip
TINY = dataclasses.replace(PROBLEM, num_experts=8, top_k=2, hidden_size=128, intermediate_size=128)  # of call_of


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "package_reason", lambda: None)


def call_of(tokens: int, **fields: Any) -> ExpertsCall:
    usual: dict[str, Any] = {"experts": 8, "hidden": 128, "inter": 128, "top_k": 2}
    return fp8_in_tiles(make_call("fp8_block", "fp8", tokens=tokens, **usual | fields))


def test_the_bound_is_in_slots_of_an_expert() -> None:
    rows = dataclasses.replace(PROBLEM, scheme="fp8")
    assert triton_tokens(rows, LARGE_BYTES - 1) == int(16 * FEW_SLOTS_SMALL)
    assert triton_tokens(PROBLEM, LARGE_BYTES - 1) == int(16 * EXACT_SLOTS[0])
    assert triton_tokens(dataclasses.replace(PROBLEM, num_experts=256), LARGE_BYTES) == int(32 * FEW_SLOTS)
    most = triton_tokens(TINY, 128 * 128)
    assert by_triton(call_of(most)) and not by_triton(call_of(most + 1))


def test_a_rank_counts_the_experts_of_all() -> None:
    most = triton_tokens(TINY, 128 * 128)
    assert by_triton(call_of(most + 1)._replace(num_experts=16))


def test_exact_kernels_between_them_and_the_fp8_tensor_cores() -> None:
    """Blocks of small experts alone."""
    least, most = triton_tokens(TINY, 128 * 128), int(EXACT_SLOTS[1] * 8) // 2
    assert [by_exact(call_of(tokens)) for tokens in (least, least + 1, most, most + 1)] == [False, True, True, False]
    assert not by_exact(call_of(most)._replace(scheme="fp8"))
    spread = call_of(least + 1)._replace(num_experts=16)
    assert not by_exact(spread) and by_triton(spread)
    assert exact_tokens(PROBLEM, 2048 * 768) == int(EXACT_SLOTS[1] * 16) and exact_tokens(PROBLEM, LARGE_BYTES) == 0
    assert exact_tokens(dataclasses.replace(PROBLEM, scheme="fp8"), 2048 * 768) == 0


def test_not_where_hidden_states_do_not_fill_tiles() -> None:
    assert not by_triton(call_of(1, hidden=192))


def test_not_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "package_reason", lambda: "it is not there")
    assert not by_triton(call_of(1))
    assert [by_exact(call_of(tokens)) for tokens in (8, 9)] == [False, True]  # behind the decode kernel
    most = exact_tokens(PROBLEM, 2048 * 768)
    text = f"decode kernel up to 8 tokens, while its buffers fit an SM, then exact prefill kernels up to {most}, then"
    assert text in moe.explain(PROBLEM).notes["cuda_sm90_fp8"]
    assert "exact" not in moe.explain(dataclasses.replace(PROBLEM, scheme="fp8")).notes["cuda_sm90_fp8"]
    unknown = moe.explain(dataclasses.replace(PROBLEM, top_k=None)).notes["cuda_sm90_fp8"]
    assert "then exact prefill kernels for some, then prefill kernels on fp8" in unknown


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Who runs calls of so many tokens; nothing does."""
    calls: list[str] = []
    monkeypatch.setattr(triton, "run", lambda call, out: calls.append("triton"))
    monkeypatch.setattr(cuda_sm90_fp8, "run_cuda", lambda call, out: calls.append("cuda"))
    monkeypatch.setattr(cuda_sm90, "run_kernel", lambda call, out, kernel: calls.append(KERNELS[kernel]))

    def run(*tokens: int, **fields: Any) -> list[str]:
        calls.clear()
        for many in tokens:
            cuda_sm90_fp8.run(call_of(many, **fields), torch.empty(0))
        return [*calls]

    return run


def test_run_follows_the_choice(ran: Callable[..., list[str]]) -> None:
    assert ran(1, 2, 8, 9, 60, 500) == ["triton", "cuda", "cuda", "triton", "slim", "cuda"]
    # More slots an expert than Triton's kernels take, yet first for the decode kernel.
    assert ran(8, 9, top_k=4) == ["cuda", "slim"]
    dense = dataclasses.replace(TINY, top_k=4)
    text = (
        "Triton's kernels up to 7 tokens, but the decode kernel for 2 to 8, then exact prefill kernels up to 56, then"
    )
    assert text in moe.explain(dense).notes["cuda_sm90_fp8"]


def test_small_experts_follow_the_bytes_that_all_slots_read(
    ran: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_sm90_fp8, "DECODE_BYTES", 128 * 128 * 2 * 5)  # of five tokens
    assert ran(5, 6) == ["cuda", "triton"]
    assert "decode kernel for 2 to 5, then" in moe.explain(TINY).notes["cuda_sm90_fp8"]
    monkeypatch.setattr(cuda_sm90_fp8, "DECODE_BYTES", 128 * 128 * 2 * 2)
    assert ran(2, 3) == ["cuda", "triton"]
    assert "decode kernel for 2, then" in moe.explain(TINY).notes["cuda_sm90_fp8"]


def test_more_slots_than_triton_takes_before_there_are_many_tokens(
    ran: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of large experts: `run_cuda` asks whether the decode kernel takes them."""
    monkeypatch.setattr(cuda_sm90_fp8, "LARGE_BYTES", 1)
    assert ran(5, 6, 9, top_k=6) == ["triton", "cuda", "cuda"]
    text = (
        "Triton's kernels up to 5 tokens, then the decode kernel up to 8 tokens, while its buffers fit an SM, then pre"
    )
    assert text in moe.explain(dataclasses.replace(TINY, top_k=6)).notes["cuda_sm90_fp8"]


def test_the_decode_kernel_where_it_is_faster_and_surely_has_room() -> None:
    large = LARGE_BYTES
    most = {(8, 768): 8, (8, 1024): 6, (6, 1408): 5, (10, 512): 8, (8, 2047): 3, (22, 2047): 0}  # top_k, intermediate
    for (top_k, inter), tokens in most.items():
        for scheme in ("fp8", "fp8_block"):
            assert tokens_of_decode(scheme, 2048, top_k, 2048 * inter) == range(2, tokens + 1)
    assert not tokens_of_decode("fp8_block", 2048, 8, large)
    assert [*tokens_of_decode("fp8", 2048, 22, 2048 * 128)] == [2, 3, 4, 5]  # no more slots than the kernel has
    assert [*tokens_of_decode("fp8", 7168, 8, large)] == [1, 2]
    assert [*tokens_of_decode("fp8", 4096, 2, large)] == [1, 2, 3]  # there would be room for 4
    assert not tokens_of_decode("fp8", 1 << 15, 2, large)


def test_tokens_that_the_decode_kernel_does_not_round_are_not_for_it() -> None:
    call = call_of(4)
    assert by_decode(call) and by_decode(call._replace(a1_gscale=torch.tensor(3.0)))
    assert not by_decode(call._replace(a1_gscale=torch.ones(8)))
    assert not by_decode(call._replace(hidden_states_scale=torch.ones(4, 1)))


def test_explain_says_it() -> None:
    most = triton_tokens(PROBLEM, 2048 * 768)
    exact = exact_tokens(PROBLEM, 2048 * 768)
    text = (
        f"Triton's kernels up to {most} tokens, but the decode kernel for 2 to 8, then exact prefill kernels up to {exact}, "
        "then prefill kernels on fp8"
    )
    assert text in moe.explain(PROBLEM).notes["cuda_sm90_fp8"]
    assert "exact" not in moe.explain(dataclasses.replace(PROBLEM, scheme="fp8")).notes["cuda_sm90_fp8"]
    unknown = dataclasses.replace(PROBLEM, top_k=None)
    text = "Triton's kernels or the decode kernel for few tokens, then exact prefill kernels for some, then prefill kernels on"
    assert text in moe.explain(unknown).notes["cuda_sm90_fp8"]
