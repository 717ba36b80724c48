"""Where an element lies, one index formula per layout. Nothing is permuted by reshaping."""

from __future__ import annotations

import torch
from torch import Tensor


def unshuffled(matrix: Tensor, block: int) -> Tensor:
    """Old row r lies at (r mod n) * 8 + r div n of its block, n = block / 8."""
    row = torch.arange(matrix.shape[0])
    inside, n = row % block, block // 8
    return matrix[row - inside + inside % n * 8 + inside // n]


def separated(matrix: Tensor) -> Tensor:
    """[up_0, gate_0, up_1, ...] -> [up; gate]."""
    return torch.cat([matrix[0::2], matrix[1::2]])


def unblocked(stored: Tensor) -> Tensor:
    """bytes [blocks, rows, 128] -> [rows, blocks * 128]: byte (m, k) lies in block k div 128."""
    blocks, rows, size = stored.shape
    k = torch.arange(blocks * size)
    return stored[(k // size)[None], torch.arange(rows)[:, None], (k % size)[None]]


def untiled(stored: Tensor) -> Tensor:
    """128x4 tiles: element (m, c) of [rows, cols] by its offset."""
    rows, cols = stored.shape
    m, c = torch.arange(rows)[:, None], torch.arange(cols)[None]
    tile = (m // 128) * (cols // 4) + c // 4
    offset = tile * 512 + (m % 32) * 16 + (m % 128) // 32 * 4 + c % 4
    return stored.reshape(-1)[offset]
