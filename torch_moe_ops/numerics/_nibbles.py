"""Two 4-bit codes in a byte: byte[j] = code[2j] | code[2j + 1] << 4."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_moe_ops.numerics._arithmetic import require_dtype
from torch_moe_ops.numerics._blocks import split_blocks


def pack(codes: Tensor) -> Tensor:
    """uint8 codes [..., K], each below 16, -> uint8 [..., K / 2]; low nibble = even k."""
    require_dtype("pack", "codes", codes, torch.uint8)
    pairs = split_blocks("pack", "codes", codes, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack(packed: Tensor) -> Tensor:
    """uint8 [..., K / 2] -> uint8 codes [..., K]."""
    require_dtype("unpack", "packed", packed, torch.uint8)
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
