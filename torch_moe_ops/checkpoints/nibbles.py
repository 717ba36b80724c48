"""Eight 4-bit codes in an int32 word."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_moe_ops.checkpoints.linear import Linear

CODES_PER_WORD = 8


def nibbles(words: Tensor) -> Tensor:
    """int32 [..., n] -> uint8 [..., 8n]; code 8j+i is bits 4i..4i+3 of word j."""
    pairs = words.contiguous().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)


def pack_words(codes: Tensor) -> Tensor:
    """Inverse of `nibbles`: uint8 [..., 8n] in 0..15 -> int32 [..., n]."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).contiguous().view(torch.int32)


def check_group_index(linear: Linear, part: str, k: int, groups: int) -> None:
    """Only the group index that says what the shapes say: column c belongs to group c // (K / groups)."""
    index = linear.shaped(part, (k,), "I32", "I64")
    if not torch.equal(index.long(), torch.arange(k) // (k // groups)):
        raise linear.fail(
            part, "be in order: columns sorted by activation (desc_act) are not supported", "a permutation"
        )
