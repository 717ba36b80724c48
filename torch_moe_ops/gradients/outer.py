"""Sums over the rows of each expert of what two rows make: the gradients of factors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from torch_moe_ops.gradients.pairs import Piece
from torch_moe_ops.gradients.products import torch_serves


def grouped_outer(left: Tensor, right: Tensor, piece: Piece) -> Tensor:
    """left[e].T @ right[e], of the rows of each expert e: [experts, M, N]; zeros for one without rows.

    Args:
        left, right: [rows, M] and [rows, N] in the order of the piece, same dtype. Rows that are not valid may hold
            anything.

    Returns: of their dtype, summed in float32 or wider.
    """
    if torch_serves(left, right, left.shape[1], right.shape[1]):
        found = grouped_mm(left.T, right, offs=piece.ends)
        counts = torch.diff(piece.ends, prepend=piece.ends.new_zeros(1))
        return torch.where((counts > 0)[:, None, None], found, 0.0)  # it leaves what has no rows undefined
    if piece.host_ends is None:
        return _without_waiting(left, right, piece)
    out = left.new_zeros((piece.ends.shape[0], left.shape[1], right.shape[1]))
    start = 0
    for result, end in zip(out, piece.host_ends, strict=True):
        if end > start:
            torch.mm(left[start:end].T, right[start:end], out=result)
        start = end
    return out


def _without_waiting(left: Tensor, right: Tensor, piece: Piece) -> Tensor:
    """All rows for each expert, those of the others as zeros: slow, but it captures."""
    assert piece.valid is not None
    found = []
    for e in range(piece.ends.shape[0]):
        mine = ((piece.expert == e) & piece.valid)[:, None]
        found.append(torch.where(mine, left, 0.0).T @ torch.where(mine, right, 0.0))
    return torch.stack(found)
