"""One projection of packed experts on rows that are sorted by expert, and its transpose, which is its gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torch_moe_ops.gradients.chunks import at_once_on_gpu
from torch_moe_ops.gradients.pairs import PIECE_ELEMENTS, Pairs, pieces
from torch_moe_ops.gradients.products import device_of, grouped_product, product_dtype, triton_serves
from torch_moe_ops.gradients.weights import MOST_EXPERTS, Projection, at_once, decode_projection


def linear_rows(
    x: Tensor,
    ends: Tensor,
    host_ends: list[int] | None,
    projection: Projection,
    transposed: bool,
) -> Tensor:
    """x[r] @ W[e].T for each row r of expert e, W [N, K] its projection; @ W[e] where transposed. Other rows are zero.

    Args:
        x: [rows, K] ([rows, N] where transposed), contiguous, any float dtype.
        ends: int64 [experts], from 0 to rows, ascending: the row behind each expert's last one; host_ends: the same
            numbers, None where the device may not be waited for.
        projection: sizes of the layer, not padded.

    Returns: [rows, N] ([rows, K] where transposed) in the dtype of x; factors and sums as gradients have them.
    """
    (n, k), count = projection.shape, projection.sizes.num_experts
    if triton_serves(x):
        plain = projection.stored.weight.dtype == torch.bfloat16
        step = count if plain else at_once_on_gpu(projection, x.shape[0], count)

        def decoded(experts: slice) -> Tensor:
            return decode_projection(projection, experts, torch.bfloat16)

        rows_and_ends = x.to(torch.bfloat16), ends.to(torch.int32)
        with device_of(x):
            return _rows_on_gpu(*rows_and_ends, k if transposed else n, step, decoded, transposed).to(x.dtype)
    dtype, rows = product_dtype(x), torch.arange(x.shape[0], device=x.device)
    out = x.new_zeros((x.shape[0], k if transposed else n))
    pairs = Pairs(rows, torch.searchsorted(ends, rows, right=True), ends, host_ends)
    is_plain = projection.scheme == "none" and projection.backend.layout.name == "linear_v1"
    is_plain = is_plain and projection.stored.weight.dtype == dtype
    step = min(count, MOST_EXPERTS) if is_plain else at_once(count, n * k)
    for first in range(0, count, step):
        experts, weight = slice(first, min(first + step, count)), None
        for piece in pieces(pairs, experts.start, experts.stop, max(1, PIECE_ELEMENTS // max(n, k))):
            if weight is None:  # not for experts without rows
                weight = decode_projection(projection, experts, dtype)
            found = grouped_product(x[piece.places].to(dtype), weight, piece, not transposed).to(x.dtype)
            if piece.valid is not None:
                found = torch.where(piece.valid[:, None], found, out[piece.places])
            out.index_copy_(0, piece.places, found)
    return out


def _rows_on_gpu(
    rows: Tensor, ends: Tensor, width: int, step: int, decoded: Callable[[slice], Tensor], transposed: bool
) -> Tensor:
    """The same [rows, width] without waiting for the device, from the weights of `step` experts at a time."""
    from torch_moe_ops.backends.triton_engine.grouped import grouped_product

    out = rows.new_zeros((rows.shape[0], width))
    for first in range(0, ends.shape[0], step):
        weights = None  # before the next ones are made
        weights = decoded(slice(first, min(first + step, ends.shape[0])))
        grouped_product(rows, None, weights, ends, first, not transposed, out)
    return out
