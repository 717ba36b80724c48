"""Products of rows, sorted by expert, with the experts' matrices."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from torch_moe_ops.core.devices import capability_of
from torch_moe_ops.gradients.pairs import Piece

_TORCH_SERVES = ((9, 0), (10, 0), (10, 3))  # where torch's grouped_mm has a kernel, and waits for nothing
_ALIGNMENT = 16  # bytes, of rows and where they begin


def product_dtype(rows: Tensor) -> torch.dtype:
    """Of the factors of products with such rows: bfloat16 on GPUs unless the rows are wider, float32 elsewhere."""
    if rows.dtype == torch.float64:
        return rows.dtype
    return torch.bfloat16 if rows.is_cuda and rows.dtype != torch.float32 else torch.float32


def operand(tensor: Tensor) -> Tensor:
    """As Triton's kernels multiply it: bfloat16, contiguous."""
    is_one = tensor.dtype is torch.bfloat16 and tensor.is_contiguous()
    return tensor if is_one else tensor.to(torch.bfloat16).contiguous()


def grouped_product(rows: Tensor, weights: Tensor, piece: Piece, transposed: bool) -> Tensor:
    """rows[r] @ weights[e] for each row r of expert e, or @ weights[e].T where transposed.

    Args:
        rows: [rows, K] in the order of the piece; weights: [experts, K, N] ([experts, N, K] where transposed), same
            dtype, both contiguous.

    Returns: [rows, N] of their dtype, summed in float32 or wider; what is in rows that are not valid is undefined.
    """
    matrices = weights.transpose(1, 2) if transposed else weights
    if torch_serves(rows, matrices, *matrices.shape[1:]):
        return grouped_mm(rows, matrices, offs=piece.ends)
    out = rows.new_empty((rows.shape[0], matrices.shape[2]))
    if triton_serves(rows):
        from torch_moe_ops.backends.triton_engine.grouped import grouped_product as multiply

        with device_of(rows):
            multiply(rows, None, weights, piece.ends, 0, transposed, out)
        return out
    if piece.host_ends is None:
        return _without_waiting(rows, matrices, piece, out)
    start = 0
    for matrix, end in zip(matrices, piece.host_ends, strict=True):
        if end > start:
            torch.mm(rows[start:end], matrix, out=out[start:end])
        start = end
    return out


def device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """In which Triton's kernels are launched on a tensor's device, whichever is the current one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def torch_serves(left: Tensor, right: Tensor, *widths: int) -> bool:
    """Whether torch's grouped_mm multiplies these two here, whose rows have so many numbers."""
    if left.dtype is not torch.bfloat16 or not left.is_cuda:
        return False
    places = (left.data_ptr(), right.data_ptr(), *(2 * width for width in widths))
    return capability_of(left.device) in _TORCH_SERVES and not any(n % _ALIGNMENT for n in places)


def triton_serves(rows: Tensor) -> bool:
    """Whether Triton multiplies such rows: those of products in bfloat16, where it runs."""
    from torch_moe_ops.backends import triton  # not at import: that would register it before others

    return product_dtype(rows) == torch.bfloat16 and triton.runs_on(rows.device)


def _without_waiting(rows: Tensor, matrices: Tensor, piece: Piece, out: Tensor) -> Tensor:
    """Every row times every matrix: slow, but it captures."""
    for e, matrix in enumerate(matrices):
        out = torch.where((piece.expert == e)[:, None], rows @ matrix, out)
    return out
