"""Memory on the host that goes back to the system with its tensor."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

_MAPPED = 1 << 20  # bytes from which memory is mapped


def mapped_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor like torch.empty's, on a CPU not from malloc's heap.

    malloc keeps freed blocks of up to 32 MiB, splits them for smaller ones, and takes more for the next layer: a model
    that is loaded layer by layer held a third more than its weights.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    has_data = type(torch.empty(0)) is Tensor  # not where FakeTensorMode makes all tensors
    if device.type != "cpu" or nbytes < _MAPPED or not has_data or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.empty(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
