"""The order of K in which the GEMMs multiply weights that are read as words of codes.

A thread that feeds the tensor core with rows of weights from registers holds, of each 16 values of K,
four that are not neighbours. Reordered K lets it take them from one aligned 8-byte read and decode
them two at a time, the codes of a pair sitting 16 bits apart in a 32-bit word. Eight codes to a word:

    natural k = 64 b + 16 t + 8 v + 4 p + 2 q + j   (t: thread of four; word v; halfword p; nibble 2q + j)
    position  = 64 b + 32 v + 16 q + 8 j + 2 t + p

Four codes to a word:

    natural k = 32 b + 8 t + 4 v + 2 p + q          (byte q of halfword p)
    position  = 32 b + 16 v + 8 q + 2 t + p

Weights keep the order of the checkpoint. Activations are written in this one by whatever makes them.

Tiles of e4m3 codes that wgmma reads where they lie (`tiled.py`) have an order of their own:

    natural k = 64 a + 16 c + 8 s + 4 u + b
    position  = 64 a + 32 s + 16 u + 4 c + b

PER_WORD: 8, 4, 16 (formats.TILED), or 1 for the natural order.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 64  # K is reordered inside blocks of this size at most, and padded to a multiple of it


@triton.jit
def reordered_position(k, PER_WORD: tl.constexpr):
    """Where natural index k (int32, any shape) of an activation row is stored."""
    if PER_WORD == 8:
        t = (k >> 4) & 3
        return (k & -64) | ((k & 8) << 2) | ((k & 2) << 3) | ((k & 1) << 3) | (t << 1) | ((k >> 2) & 1)
    elif PER_WORD == 4:
        t = (k >> 3) & 3
        return (k & -32) | ((k & 4) << 2) | ((k & 1) << 3) | (t << 1) | ((k >> 1) & 1)
    elif PER_WORD == 16:
        return (k & -64) | ((k & 12) << 2) | (((k >> 4) & 3) << 2) | (k & 3)
    else:
        return k


@triton.jit
def reorder(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PER_WORD: tl.constexpr):
    """x: [ROWS, COLUMNS], rows in natural order of K, a multiple of 64 -> rows in the stored order."""
    if PER_WORD == 8:
        parts = x.reshape(ROWS // 64, 4, 2, 2, 2, 2, COLUMNS).permute(0, 2, 4, 5, 1, 3, 6)
        return parts.reshape(ROWS, COLUMNS)
    elif PER_WORD == 4:
        parts = x.reshape(ROWS // 32, 4, 2, 2, 2, COLUMNS).permute(0, 2, 4, 1, 3, 5)
        return parts.reshape(ROWS, COLUMNS)
    elif PER_WORD == 16:
        parts = x.reshape(ROWS // 64, 4, 4, 4, COLUMNS).permute(0, 2, 1, 3, 4)
        return parts.reshape(ROWS, COLUMNS)
    else:
        return x
