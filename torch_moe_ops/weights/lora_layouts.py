"""Adapters of experts as other libraries store them, and as `moe.Lora` and `merge_lora` take them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def from_peft(lora_a: Tensor, lora_b: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """PEFT's two matrices of a parameter of all experts as factors A [experts, r, in] and B [experts, out, r]: views.

    Args:
        lora_a: [experts * r, in], row expert * r + j.
        lora_b: [out, r * experts], column j * experts + expert.

    Raises: ValueError naming the shapes, where they are none of so many experts.
    """
    ranks = lora_a.shape[0]
    if lora_a.ndim != 2 or lora_b.ndim != 2 or not ranks or ranks % num_experts or lora_b.shape[1] != ranks:
        raise ValueError(
            f"from_peft: lora_a and lora_b must have shapes [{num_experts} * r, in] and [out, r * {num_experts}], got "
            f"{tuple(lora_a.shape)} and {tuple(lora_b.shape)}"
        )
    return lora_a.unflatten(0, (num_experts, -1)), lora_b.unflatten(1, (-1, num_experts)).permute(2, 0, 1)


def to_peft(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse of from_peft, contiguous."""
    return a.flatten(0, 1).contiguous(), b.permute(1, 2, 0).flatten(1).contiguous()


def from_vllm(a_stacked: Sequence[Tensor], b_stacked: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """vLLM's stacks of one projection as factors of several adapters, ranks side by side: a13 and b13, or a2 and b2.

    vLLM multiplies B by the scaling when it loads an adapter, so that `moe.Lora` gets ones.

    Args:
        a_stacked: a tensor [adapters, experts, r, K] for each slice: gate and up of w13, which then have factors A of
            their own, or one for all rows. One expert stands for all of them, as where they share it.
        b_stacked: as many, [adapters, experts, rows of the slice, r].

    Returns: A [experts, adapters * slices * r, K] and B [experts, rows of all slices, adapters * slices * r]: the
        ranks of a slice are zero for the rows of another.
    Raises: ValueError where slices do not match.
    """
    shapes = [tuple(t.shape) for t in (*a_stacked, *b_stacked)]
    if not a_stacked or len(a_stacked) != len(b_stacked) or any(len(shape) != 4 for shape in shapes):
        raise ValueError(
            "from_vllm: a_stacked and b_stacked must hold a tensor of 4 dimensions for each slice, got shapes "
            f"{shapes[: len(a_stacked)]} and {shapes[len(a_stacked) :]}"
        )
    experts = max(shape[1] for shape in shapes)
    a = torch.cat([t.expand(-1, experts, -1, -1) for t in a_stacked], 2)
    rows = []
    for i, own in enumerate(b_stacked):
        before, after = (sum(t.shape[2] for t in part) for part in (a_stacked[:i], a_stacked[i + 1 :]))
        rows.append(torch.nn.functional.pad(own.expand(-1, experts, -1, -1), (before, after)))
    b = torch.cat(rows, 2)
    return a.transpose(0, 1).flatten(1, 2).contiguous(), b.permute(1, 2, 0, 3).flatten(2).contiguous()
