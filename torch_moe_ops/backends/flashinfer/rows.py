"""Orders of weight rows that FlashInfer's kernels read, as closed forms.

An order is an index tensor: row i of the prepared matrix is row order[i] of the checkpoint's. It is put
together from up to three steps, in the order in which they are applied to a matrix:

1. halves: [gate; up] -> [up; gate].
2. interleave: [up; gate] -> [up_0, gate_0, up_1, gate_1, ...], so that one tile of the first GEMM holds
   both factors of an output.
3. shuffle: in blocks of B rows, row r moves to (r % n) * 8 + r // n with n = B / 8, so that a thread that
   owns 8 rows apart in the accumulator writes neighbours. B is 32 for an epilogue tile of 128 rows, 16 for 64.
"""

from __future__ import annotations

import torch
from torch import Tensor


def swap_halves(rows: int) -> Tensor:
    """[gate; up] -> [up; gate]; its own inverse. rows is even."""
    return (torch.arange(rows) + rows // 2) % rows


def interleave_halves(rows: int) -> Tensor:
    """[a; b] -> [a_0, b_0, a_1, b_1, ...]. rows is even."""
    position = torch.arange(rows)
    return position % 2 * (rows // 2) + position // 2


def shuffle_blocks(rows: int, block: int) -> Tensor:
    """The shuffle of step 3. rows is a multiple of block, which is 16 or 32."""
    position = torch.arange(rows)
    inside = position % block
    return position - inside + inside % 8 * (block // 8) + inside // 8


def row_order(rows: int, gated: bool, interleave: bool, block: int) -> Tensor:
    """The steps that apply, composed. int64 [rows].

    Args:
        gated: rows are [gate; up]: do step 1, and step 2 where interleave is set.
        block: of step 3; 0 leaves it out.
    """
    order = shuffle_blocks(rows, block) if block else torch.arange(rows)
    if gated and interleave:
        order = interleave_halves(rows)[order]
    return swap_halves(rows)[order] if gated else order
