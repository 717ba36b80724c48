"""Weights in the tiles of the `cuda_sm90_fp8` backend: 64 rows of 128 e4m3 codes, 8192 bytes one after another.

csrc/cuda/sm90/layout/w4a8_layout.h says where bytes lie. A tile's rows are read whole, so that only the order of the
rows, of the 16-byte pieces of one and of K inside it (permute.py) differ from weights that lie row after row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_moe_ops.core.kernel_facts import Sm90W4a8

ROWS, TILE_K = Sm90W4a8.TILE_ROWS, Sm90W4a8.TILE_K
TILE_BYTES = tl.constexpr(Sm90W4a8.FP8_BYTES)


@triton.jit
def tile_row(rows, HALF: tl.constexpr, GATED: tl.constexpr):
    """Where rows of a weight are in its tiles. GATED: HALF of them are gate rows, with up rows between each 8."""
    if GATED:
        inner = rows % HALF
        return inner // 8 * 16 + rows // HALF * 8 + inner % 8
    else:
        return rows // 16 * 16 + rows % 2 * 8 + rows % 16 // 2


@triton.jit
def tile_pointers(w_ptr, rows, tile, HALF: tl.constexpr, GATED: tl.constexpr, K: tl.constexpr):
    """Pointers [rows, 128] to an expert's tile-th 128 values of K. The next 128 are TILE_BYTES further."""
    row = tile_row(rows, HALF, GATED)
    byte = tl.arange(0, 128)
    piece = (byte // 16)[None, :] ^ (row % 8)[:, None]  # as wgmma's swizzle of 128 bytes has it
    start = (row // 64 * ((K + 127) // 128) + tile) * TILE_BYTES + row % 64 * 128
    return w_ptr + start[:, None] + (piece * 16 + (byte % 16)[None, :])
