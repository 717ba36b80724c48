"""One projection of packed experts on rows that are sorted by expert, and its transpose, which is its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_moe_ops.backends.registry import Backend
from torch_moe_ops.core.layout import Sizes
from torch_moe_ops.gradients.pairs import PIECE_ELEMENTS, Pairs, pieces
from torch_moe_ops.gradients.products import grouped_product, product_dtype
from torch_moe_ops.gradients.weights import MOST_EXPERTS, Stored, at_once, decode_projection


def linear_rows(
    x: Tensor,
    ends: Tensor,
    host_ends: list[int] | None,
    name: str,
    stored: Stored,
    scheme: str,
    weight_policy: str,
    backend: Backend,
    sizes: Sizes,
    transposed: bool,
) -> Tensor:
    """x[r] @ W[e].T for each row r of expert e, W [N, K] its projection; @ W[e] where transposed. Other rows are zero.

    Args:
        x: [rows, K] ([rows, N] where transposed), contiguous, any float dtype.
        ends: int64 [experts], from 0 to rows, ascending: the row behind each expert's last one; host_ends: the same
            numbers, None where the device may not be waited for.
        name: "w13" or "w2"; sizes: of the layer, not padded.

    Returns: [rows, N] ([rows, K] where transposed) in the dtype of x; factors and sums as gradients have them.
    """
    n, k = projection_shape(name, sizes)
    dtype, rows = product_dtype(x), torch.arange(x.shape[0], device=x.device)
    out = x.new_zeros((x.shape[0], k if transposed else n))
    pairs = Pairs(rows, torch.searchsorted(ends, rows, right=True), ends, host_ends)
    is_plain = scheme == "none" and backend.layout.name == "linear_v1" and stored.weight.dtype == dtype
    step = min(sizes.num_experts, MOST_EXPERTS) if is_plain else at_once(sizes.num_experts, n * k)
    for first in range(0, sizes.num_experts, step):
        experts, weight = slice(first, min(first + step, sizes.num_experts)), None
        for piece in pieces(pairs, experts.start, experts.stop, max(1, PIECE_ELEMENTS // max(n, k))):
            if weight is None:  # not for experts without rows
                weight = decode_projection(name, stored, scheme, weight_policy, backend, sizes, experts, dtype)
            found = grouped_product(x[piece.places].to(dtype), weight, piece, not transposed).to(x.dtype)
            if piece.valid is not None:
                found = torch.where(piece.valid[:, None], found, out[piece.places])
            out.index_copy_(0, piece.places, found)
    return out


def projection_shape(name: str, sizes: Sizes) -> tuple[int, int]:
    """Rows and K of an expert's projection."""
    if name == "w2":
        return sizes.hidden_size, sizes.intermediate_size
    return (2 if sizes.is_gated else 1) * sizes.intermediate_size, sizes.hidden_size
