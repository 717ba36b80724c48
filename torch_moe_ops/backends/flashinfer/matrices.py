"""Moving the matrices of all experts into a layout and back, one expert at a time.

Beside the result, at most two matrices of one expert are alive: a padded copy of the source and its rows in
their new order. Everything moves as bytes (or as int16, for 2-byte scales), on the device of the source.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_BYTES = 128  # of K, in the blocked layout


@dataclass(frozen=True)
class MatrixLayout:
    """How the rows of a weight matrix lie.

    shuffle: rows of a shuffled block (32, 16), or 0. interleave: gate and up rows alternate.
    blocked: K is cut into blocks of 128 bytes: [K bytes / 128, rows, 128] in place of [rows, K bytes].
    flip: XOR of every byte; 0x88 turns nibbles with an offset of 8 into two's complement.
    """

    shuffle: int = 0
    interleave: bool = False
    blocked: bool = False
    flip: int = 0


def pad_matrix(matrix: Tensor, halves: int, rows: int, cols: int) -> Tensor:
    """[r, c] -> [rows, cols] with zeros; each half of the rows is padded on its own. The same tensor if it fits.

    Padding behind the last row instead would move the boundary between gate and up.
    """
    if matrix.shape == (rows, cols):
        return matrix
    padded = matrix.new_zeros(halves, rows // halves, cols)
    parts = matrix.unflatten(0, (halves, -1))
    padded[:, : parts.shape[1], : parts.shape[2]] = parts
    return padded.flatten(0, 1)


def cut_matrix(matrix: Tensor, halves: int, rows: int, cols: int) -> Tensor:
    """Inverse of pad_matrix."""
    return matrix.unflatten(0, (halves, -1))[:, : rows // halves, :cols].flatten(0, 1)


def arrange_weights(source: Tensor, out: Tensor, layout: MatrixLayout, order: Tensor, halves: int) -> None:
    """Fill `out` with the weights of `source`.

    Args:
        source: uint8 [E, rows, K bytes], rows [gate; up] where halves is 2.
        out: uint8 [E, padded rows, padded K bytes], or [E, blocks, padded rows, 128]; contiguous.
        order: of the padded rows, on the device of source.
    """
    rows = order.numel()
    cols = out[0].numel() // rows
    for one, target in zip(source, out, strict=True):
        padded = pad_matrix(one, halves, rows, cols)
        if layout.blocked:
            target.copy_(padded.index_select(0, order).unflatten(1, (-1, BLOCK_BYTES)).transpose(0, 1))
        else:
            torch.index_select(padded, 0, order, out=target)
        if layout.flip:
            target.bitwise_xor_(layout.flip)


def restore_weights(stored: Tensor, out: Tensor, layout: MatrixLayout, order: Tensor, halves: int) -> None:
    """Inverse of arrange_weights: from `stored` into `out` [E, rows, K bytes]."""
    back = torch.argsort(order)
    for one, target in zip(stored, out, strict=True):
        rows = one.transpose(0, 1).flatten(1) if layout.blocked else one
        cut = cut_matrix(rows.index_select(0, back), halves, *target.shape)
        target.copy_(cut ^ layout.flip if layout.flip else cut)


def arrange_scales(source: Tensor, out: Tensor, order: Tensor, halves: int) -> None:
    """Block scales of 1 or 2 bytes: padded, in the order of their rows, then tiled 128x4.

    source: [E, rows, cols]; out: [E, padded rows, padded cols], contiguous; padded rows a multiple of 128,
    padded cols of 4. The shape of `out` is not where its elements are: the tiling is.
    """
    for one, target in zip(_bits(source), _groups(out), strict=True):
        moved = pad_matrix(one, halves, target.shape[0], target.shape[1] * 4).index_select(0, order)
        tile_scales(_groups(moved), target)


def restore_scales(stored: Tensor, out: Tensor, order: Tensor, halves: int) -> None:
    """Inverse of arrange_scales."""
    back = torch.argsort(order)
    for one, target in zip(_groups(stored), _bits(out), strict=True):
        linear = untile_scales(one).index_select(0, back).view(target.dtype)
        target.copy_(cut_matrix(linear, halves, *target.shape))


def tile_scales(linear: Tensor, out: Tensor) -> None:
    """The tiling of quant.swizzle, on whole tiles whose 4 neighbouring scales are one integer: 30 times faster.

    linear, out: [rows, cols / 4], rows a multiple of 128.
    """
    tiles = linear.view(-1, 4, 32, linear.shape[1])
    out.view(tiles.shape[0], linear.shape[1], 32, 4).copy_(tiles.permute(0, 3, 2, 1))


def untile_scales(tiled: Tensor) -> Tensor:
    """Inverse of tile_scales: a new tensor [rows, cols / 4]."""
    rows, groups = tiled.shape
    return tiled.view(-1, groups, 32, 4).permute(0, 3, 2, 1).reshape(rows, groups)


def _bits(scale: Tensor) -> Tensor:
    return scale.view(torch.uint8 if scale.element_size() == 1 else torch.int16)


def _groups(scale: Tensor) -> Tensor:
    """Four neighbouring scales as one integer."""
    return scale.view(torch.int32 if scale.element_size() == 1 else torch.int64)
