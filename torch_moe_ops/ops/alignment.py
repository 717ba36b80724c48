"""Addresses of tensors that GPU kernels read: a view may begin anywhere, and loads of 16 bytes may not."""

from __future__ import annotations

from torch import Tensor

ALIGNMENT = 16  # bytes: what the kernels load and store at once; torch's allocator gives 512


def is_aligned(tensor: Tensor) -> bool:
    """Whether the first element lies at a multiple of ALIGNMENT."""
    return tensor.data_ptr() % ALIGNMENT == 0


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where it begins in between."""
    return tensor if is_aligned(tensor) else tensor.clone()
