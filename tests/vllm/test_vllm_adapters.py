"""vLLM's stacks of adapters as views of the factors that the op takes, without vLLM."""

from __future__ import annotations

from types import SimpleNamespace as Namespace
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_moe_ops.vllm.adapters import Adapters, adopt, check_lora
from torch_moe_ops.weights.lora_layouts import from_vllm

ADAPTERS, EXPERTS, RANKS, HIDDEN, INTER = 3, 4, 2, 16, 8


def _stacks(rows: tuple[int, ...], k: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    a = tuple(torch.randn(ADAPTERS, EXPERTS, RANKS, k) for _ in rows)
    return a, tuple(torch.randn(ADAPTERS, EXPERTS, n, RANKS) for n in rows)


@pytest.mark.parametrize("rows", [(INTER, INTER), (2 * INTER,), (HIDDEN,)])
def test_stacks_become_views_of_the_factors(rows: tuple[int, ...]) -> None:
    a_stacked, b_stacked = _stacks(rows, HIDDEN)
    expected = from_vllm(a_stacked, b_stacked)
    shapes = [t[0][1].shape for t in (*a_stacked, *b_stacked)]  # as vLLM keeps them, of one adapter and expert
    kept = [t[0][1] for t in (*a_stacked, *b_stacked)]
    a, b = adopt(a_stacked, b_stacked)
    assert a.is_contiguous() and b.is_contiguous()
    assert torch.equal(a, expected[0])
    assert torch.equal(b, expected[1])
    assert [t.shape for t in kept] == shapes
    assert all(t.untyped_storage().nbytes() == 0 for t in kept), "the memory that the stacks had is free"
    # vLLM loads an adapter of fewer ranks into a slot, and clears another.
    for i, stack in enumerate((*a_stacked, *b_stacked)):
        stack[1] = 0
        stack[2, :, :1, :1].copy_(torch.full((EXPERTS, 1, 1), 5.0 + i))
    expected = from_vllm(a_stacked, b_stacked)
    assert torch.equal(a, expected[0])
    assert torch.equal(b, expected[1])
    assert (a == 5).sum() == EXPERTS


def test_adapters_of_a_layer() -> None:
    w13, w2 = _stacks((INTER, INTER), HIDDEN), _stacks((HIDDEN,), INTER)
    mapping = Namespace(_token_lora_indices=torch.tensor([2, -1, 0, 7, 7]))
    adapters = Adapters(
        Namespace(
            w13_lora_a_stacked=w13[0], w13_lora_b_stacked=w13[1], w2_lora_a_stacked=w2[0], w2_lora_b_stacked=w2[1],
            max_loras=ADAPTERS, punica_wrapper=mapping,
        )
    )  # fmt: skip
    lora = adapters.lora
    shapes = [tuple(t.shape) for t in (lora.a13, lora.b13, lora.a2, lora.b2) if t is not None]
    ranks = ADAPTERS * RANKS
    assert shapes == [
        (EXPERTS, 2 * ranks, HIDDEN),
        (EXPERTS, 2 * INTER, 2 * ranks),
        (EXPERTS, ranks, INTER),
        (EXPERTS, HIDDEN, ranks),
    ]
    assert isinstance(lora.scaling, Tensor) and lora.scaling.tolist() == [1.0] * ADAPTERS
    mapping._token_lora_indices[0] = 1  # vLLM writes there before each batch
    ids = adapters.ids(3)
    assert ids.dtype == torch.int32
    assert ids.tolist() == [1, -1, 0]


def test_stacks_that_do_not_match_are_refused() -> None:
    (a, _), (b, _) = _stacks((INTER, INTER), HIDDEN)
    for a_stacked, b_stacked in (((a, a), (b,)), ((a,), (b[:, :1],)), ((a, a[:, :, :1]), (b, b))):
        with pytest.raises(ValueError, match="stacks of adapters must be"):
            adopt(a_stacked, b_stacked)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_ep": True}, "expert and data parallelism must be off with LoRA"),
        ({"dp_size": 2}, "expert and data parallelism must be off with LoRA"),
        ({"fully_sharded_loras": True}, "fully_sharded_loras must be off"),
        ({"enable_moe_shared_loras": True}, "enable_moe_shared_loras must be off"),
        ({"interleaved": True}, "gates before ups with LoRA"),
    ],
)
def test_what_is_left_to_vllm(changes: dict[str, Any], reason: str) -> None:
    given = {"use_ep": False, "dp_size": 1, "fully_sharded_loras": False, "interleaved": False} | changes
    both = Namespace(**given)
    with pytest.raises(ValueError, match=reason):
        check_lora(both, both, given["interleaved"])
