"""The 128x4 tiling of block scales that TRTLLM, CUTLASS and cuBLAS kernels read.

Rows are padded to 128 and columns to 4, with zeros. Element (m, c) of a matrix with T = padded_cols / 4 tiles a row:

    offset = (((m // 128) * T + c // 4) * 32 + m % 32) * 16 + (m % 128) // 32 * 4 + c % 4

Source: NVIDIA cuBLAS documentation, "1D block scaling factors layout".
"""

from __future__ import annotations

import torch
from torch import Tensor

_ROWS, _COLS = 128, 4  # of a tile; a tile is stored as 32 x (4 x 4)
_BITS = {1: torch.uint8, 2: torch.int16}


def padded_shape(rows: int, cols: int) -> tuple[int, int]:
    """rows and cols rounded up to whole tiles."""
    return -(-rows // _ROWS) * _ROWS, -(-cols // _COLS) * _COLS


def swizzle_scale(scale: Tensor) -> Tensor:
    """Tile scales of any dtype of 1 or 2 bytes, which is kept.

    Args:
        scale: [..., rows, cols], any strides.
    Returns: [..., padded rows * padded cols], new tensor, zeros in the padding.
    """
    if scale.ndim < 2:
        raise ValueError(f"swizzle_scale: scale must have shape [..., rows, cols], got {tuple(scale.shape)}")
    bits = scale.view(_bits_dtype("swizzle_scale", "scale", scale))
    (rows, cols), lead = scale.shape[-2:], scale.shape[:-2]
    padded_rows, padded_cols = padded_shape(rows, cols)
    padded = bits.new_zeros((*lead, padded_rows, padded_cols))
    padded[..., :rows, :cols] = bits
    tiles = padded.view(*lead, padded_rows // _ROWS, 4, 32, padded_cols // _COLS, _COLS)
    return tiles.movedim(-2, -4).transpose(-3, -2).reshape(*lead, padded_rows * padded_cols).view(scale.dtype)


def unswizzle_scale(flat: Tensor, rows: int, cols: int) -> Tensor:
    """Inverse of swizzle_scale: [..., padded rows * padded cols] -> [..., rows, cols], new tensor."""
    padded_rows, padded_cols = padded_shape(rows, cols)
    size = padded_rows * padded_cols
    if flat.ndim < 1 or flat.shape[-1] != size or rows < 0 or cols < 0:
        raise ValueError(
            f"unswizzle_scale: flat must hold {size} elements in its last dimension for rows={rows}, cols={cols} "
            f"(both at least 0), got shape {tuple(flat.shape)}"
        )
    bits = flat.view(_bits_dtype("unswizzle_scale", "flat", flat))
    lead = flat.shape[:-1]
    tiles = bits.reshape(*lead, padded_rows // _ROWS, padded_cols // _COLS, 32, 4, _COLS)
    linear = tiles.transpose(-3, -2).movedim(-4, -2).reshape(*lead, padded_rows, padded_cols)
    return linear[..., :rows, :cols].contiguous().view(flat.dtype)


def _bits_dtype(function: str, name: str, t: Tensor) -> torch.dtype:
    """The integer dtype to move elements as: torch cannot index or fill some of the 8-bit floats."""
    if t.element_size() not in _BITS:
        raise TypeError(f"{function}: {name} must have a dtype of 1 or 2 bytes, got {t.dtype}")
    return _BITS[t.element_size()]
