"""Adapters in the layouts of PEFT and vLLM: what their own formulas add to each expert, and back."""

from __future__ import annotations

import pytest
import torch

from torch_moe_ops.weights.lora_layouts import from_peft, from_vllm, to_peft

EXPERTS, RANK, ROWS, K = 3, 2, 6, 5


def test_peft_numbers_ranks_in_two_ways() -> None:
    lora_a, lora_b = torch.randn(EXPERTS * RANK, K), torch.randn(ROWS, RANK * EXPERTS)
    a, b = from_peft(lora_a, lora_b, EXPERTS)
    # As peft.tuners.lora.layer.ParamWrapper.get_delta_weight has it.
    expected = torch.einsum("o r e, e r i -> e o i", lora_b.reshape(ROWS, -1, EXPERTS), lora_a.reshape(EXPERTS, -1, K))
    torch.testing.assert_close(b @ a, expected)
    back = to_peft(a, b)
    assert torch.equal(back[0], lora_a)
    assert torch.equal(back[1], lora_b)


@pytest.mark.parametrize("shapes", [((7, 5), (6, 7)), ((6, 5), (6, 9)), ((6,), (6, 6))])
def test_shapes_that_are_not_pefts(shapes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match=r"from_peft: lora_a and lora_b must have shapes \[3 \* r, in\]"):
        from_peft(torch.zeros(shapes[0]), torch.zeros(shapes[1]), EXPERTS)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("slices", [1, 2])
def test_vllm_stacks_adapters_and_slices(slices: int, shared: bool) -> None:
    adapters = 4
    of_a = 1 if shared else EXPERTS  # gate and up of all experts read the same low rank
    a_stacked = [torch.randn(adapters, of_a, RANK, K) for _ in range(slices)]
    b_stacked = [torch.randn(adapters, EXPERTS, ROWS, RANK) for _ in range(slices)]
    stacks = a_stacked, b_stacked
    a, b = from_vllm(*stacks)
    assert a.shape == (EXPERTS, adapters * slices * RANK, K)
    assert b.shape == (EXPERTS, slices * ROWS, adapters * slices * RANK)
    own_a, own_b = a.unflatten(1, (adapters, -1)), b.unflatten(2, (adapters, -1))
    for adapter in range(adapters):
        for e in range(EXPERTS):
            expected = [sb[adapter, e] @ sa[adapter, 0 if shared else e] for sa, sb in zip(*stacks, strict=True)]
            torch.testing.assert_close(own_b[e, :, adapter] @ own_a[e, adapter], torch.cat(expected))


def test_vllm_slices_that_do_not_match() -> None:
    with pytest.raises(ValueError, match="must hold a tensor of 4 dimensions for each slice"):
        from_vllm([torch.zeros(1, 1, 2, 5)], [torch.zeros(1, 1, 6, 2)] * 2)
