"""Whether two tensors are the same down to the last bit."""

from __future__ import annotations

import torch
from torch import Tensor


def same_bits(a: Tensor, b: Tensor) -> bool:
    """The same dtype, shape and bits, on whatever devices: NaNs equal themselves, and -0 is not 0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(_bytes(a), _bytes(b.to(a.device)))


def _bytes(t: Tensor) -> Tensor:
    return t.detach().contiguous().reshape(-1).view(torch.uint8) if t.numel() else t.new_empty(0, dtype=torch.uint8)
