"""Which weight rows a tile of GEMM1 multiplies, and its gate and up halves."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gemm1_columns(column_tile, INTER: tl.constexpr, IS_GATED: tl.constexpr, BLOCK_N: tl.constexpr):
    """The rows of w13 that a tile multiplies; those beyond the last one are repeated, and never stored."""
    n = tl.arange(0, BLOCK_N)
    if IS_GATED:
        # Runs of 8 rows: a gate row and its up row then belong to the same thread of the tensor core's tile.
        inner = column_tile * (BLOCK_N // 2) + (n // 16) * 8 + n % 8
        columns = ((n // 8) % 2) * INTER + tl.minimum(inner, INTER - 1)
    else:
        columns = tl.minimum(column_tile * BLOCK_N + n, INTER - 1)
    return columns


@triton.jit
def halves(acc, HALF: tl.constexpr, BLOCK_T: tl.constexpr):
    """Gate and up rows of a tile whose rows alternate between them in runs of 8."""
    pairs = acc.reshape(HALF // 8, 2, 8, BLOCK_T).permute(0, 2, 3, 1)
    gate, up = pairs.split()
    return gate.reshape(HALF, BLOCK_T), up.reshape(HALF, BLOCK_T)
