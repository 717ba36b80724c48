"""The layout "cuda_sm90" of NVFP4 weights: pack, and the exact inverse. csrc/cuda/sm90/layout.h says where bits lie.

A weight [E, N, K] is [E, row tiles, K tiles, 2048]: tiles of 64 rows x 64 values in the order in which a warpgroup's
threads hold the A operand of wgmma. Its scales are [E, row tiles, K tiles, 256]. Rows and K are padded with zeros to
multiples of 64; where gated, each half of w13 by itself, as its rows alternate in groups of eight. So a layer has the
shapes of one whose intermediate size is rounded up to a multiple of 64.

Codes: a thread has 16 of one row and 16 of the row eight below; those at 4 j .. 4 j + 3 of both, 32 bits together,
become word j of the thread. A word is a linear function (over XOR) of those bits, so it is looked up half by half.
Block scales, never negative, are stored as (r + 23) << 3 | m for 2^r * (1 + m / 8), and as 0 for zero.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 64  # rows of a tile, and values of K
CODE_BYTES = TILE * TILE // 2
SCALE_BYTES = TILE * TILE // 16
LARGEST_SCALE = 126  # e4m3 code of 448
_LANES = 16  # of four codes, in a row of a tile
_BLOCKS = 4  # in a row of a tile


def tiles(size: int) -> int:
    """Tiles that hold `size` rows or values of K."""
    return -(-size // TILE)


def shapes(experts: int, rows: int, k: int, gated: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of codes and scales of a weight with `rows` rows in all; gated: half of them are gate rows."""
    tiled = (experts, 2 * tiles(rows // 2) if gated else tiles(rows), tiles(k))
    return (*tiled, CODE_BYTES), (*tiled, SCALE_BYTES)


def pack_codes(codes: Tensor, gated: bool) -> Tensor:
    """uint8 [E, N, K / 2], low nibble = even element, rows [gate; up] where gated -> [E, row tiles, K tiles, 2048]."""
    experts, rows, columns = codes.shape
    codes = codes.contiguous()
    lanes = (codes.clone() if codes.storage_offset() % 2 else codes).view(torch.int16)
    tables = _tables(_encode, codes.device)
    out = codes.new_empty(shapes(experts, rows, 2 * columns, gated)[0])
    for e in range(experts):
        first, second = _to_tiles(lanes[e], gated, _LANES).unbind(2)
        words = _look_up(tables[0], first) ^ _look_up(tables[1], second)  # [row tile, warp, g, K tile, lane]
        out[e].view(torch.int32).unflatten(2, (4, 8, _LANES)).copy_(words.permute(0, 3, 1, 2, 4))
    return out


def unpack_codes(packed: Tensor, rows: int, k: int, gated: bool) -> Tensor:
    """Inverse of pack_codes for a weight of `rows` rows in all and K = k."""
    tables = _tables(_decode, packed.device)
    out = packed.new_empty((packed.shape[0], rows, k // 2))
    for e in range(packed.shape[0]):
        low, high = packed[e].view(torch.int16).unflatten(2, (4, 8, _LANES, 2)).unbind(5)
        both = _look_up(tables[0], low) ^ _look_up(tables[1], high)  # [row tile, K tile, warp, g, lane]
        pair = both.unsqueeze(5).view(torch.int16).permute(0, 2, 5, 3, 1, 4)
        _from_tiles(pair, gated, out[e].view(torch.int16))
    return out


def pack_scales(scales: Tensor, gated: bool, name: str) -> Tensor:
    """float8_e4m3fn [E, N, K / 16] -> uint8 [E, row tiles, K tiles, 256].

    Raises ValueError in the name of the argument where a scale is negative, -0 or NaN: no byte stands for it.
    """
    codes = scales.contiguous().view(torch.uint8)
    experts, rows, columns = codes.shape
    out = codes.new_empty(shapes(experts, rows, TILE // _BLOCKS * columns, gated)[1])
    table = _bytes_of_scales().to(codes.device)
    for e in range(experts):
        if int(codes[e].max()) > LARGEST_SCALE:
            wrong = int(codes[e][codes[e] > LARGEST_SCALE][0])
            text = f"{name} must hold positive finite scales or zero (e4m3 codes up to {LARGEST_SCALE:#x})"
            raise ValueError(f"backend 'cuda_sm90': {text}, got code {wrong:#x} in expert {e}")
        tiled = _to_tiles(_look_up(table, codes[e]), gated, _BLOCKS)
        out[e].unflatten(2, (4, 8, _BLOCKS, 2)).copy_(tiled.permute(0, 4, 1, 3, 5, 2))
    return out


def unpack_scales(packed: Tensor, rows: int, k: int, gated: bool) -> Tensor:
    """Inverse of pack_scales for a weight of `rows` rows in all and K = k."""
    out = packed.new_empty((packed.shape[0], rows, k // (TILE // _BLOCKS)))
    table = _scales_of_bytes().to(packed.device)
    for e in range(packed.shape[0]):
        tiled = _look_up(table, packed[e]).unflatten(2, (4, 8, _BLOCKS, 2)).permute(0, 2, 5, 3, 1, 4)
        _from_tiles(tiled, gated, out[e])
    return out.view(torch.float8_e4m3fn)


def _to_tiles(x: Tensor, gated: bool, width: int) -> Tensor:
    """[N, columns] -> [row tile, warp 4, h 2, g 8, K tile, width]: row 16 warp + 8 h + g of its tile.

    Where gated, h says which half of the rows.
    """
    halves = x.view(2 if gated else 1, -1, x.shape[1])
    extra_rows, extra_columns = -halves.shape[1] % TILE, -x.shape[1] % width
    padded = F.pad(halves, (0, extra_columns, 0, extra_rows)) if extra_rows or extra_columns else halves
    if gated:
        return padded.view(2, padded.shape[1] // (TILE // 2), 4, 8, -1, width).permute(1, 2, 0, 3, 4, 5)
    return padded.view(padded.shape[1] // TILE, 4, 2, 8, -1, width)


def _from_tiles(tiled: Tensor, gated: bool, out: Tensor) -> None:
    """Inverse of _to_tiles, into out [N, columns]."""
    halves = out.view(2 if gated else 1, -1, out.shape[1])
    ordered = tiled.permute(2, 0, 1, 3, 4, 5) if gated else tiled
    whole = ordered.reshape(halves.shape[0], -1, tiled.shape[4] * tiled.shape[5])
    halves.copy_(whole[:, : halves.shape[1], : halves.shape[2]])


def _look_up(table: Tensor, index: Tensor) -> Tensor:
    """table[index] of the same shape; int16 indices are taken as unsigned."""
    flat = index.reshape(-1).int()
    return table.index_select(0, flat & 0xFFFF if index.dtype == torch.int16 else flat).view(index.shape)


@cache
def _tables(function: Callable[[Tensor], Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """What a linear function of 32 bits makes of the lower 16 and of the upper 16, int32."""
    half = torch.arange(1 << 16)
    low, high = (function(bits).to(torch.int32).to(device) for bits in (half, half << 16))
    return low, high


# Nibbles of 32 bits, in this order: of row g, then of row g + 8, four values of K each.
_REGISTERS = ((0, 4), (16, 20), (8, 12), (24, 28))  # shifts of the low and the high code of the fragment's registers
_FIELDS = 0x81C081C0  # a register's two codes as bfloat16 bits: sign, and three bits at 6


def _encode(nibbles: Tensor) -> Tensor:
    """int64 -> the stored word, the inverse of layout.h's four expressions."""
    v = [_place(nibbles >> low) | _place(nibbles >> high) << 16 for low, high in _REGISTERS]
    word = (v[0] >> 6) | (v[1] >> 2) | ((v[2] << 4) & 0xFFFFFFFF) | (v[2] >> 28)
    # v[3] = (word ^ word >> 8) in its fields, solved from the top bit down.
    word |= v[3] & 0x81000000
    for bits in (0x00800000, 0x00008000, 0x00000180):
        word |= (v[3] ^ (word >> 8)) & bits
    word |= ((v[3] ^ word) << 8) & 0x40004000
    return _as_int32(word)


def _decode(word: Tensor) -> Tensor:
    """Inverse of _encode."""
    rotated = ((word >> 4) | (word << 28)) & 0xFFFFFFFF
    v = [field & _FIELDS for field in (word << 6, word << 2, rotated, word ^ (word >> 8))]
    nibbles = torch.zeros_like(word)
    for register, (low, high) in zip(v, _REGISTERS, strict=True):
        nibbles |= (_take(register) << low) | (_take(register >> 16) << high)
    return _as_int32(nibbles)


def _place(code: Tensor) -> Tensor:
    return ((code & 8) << 12) | ((code & 7) << 6)


def _take(half: Tensor) -> Tensor:
    return ((half >> 12) & 8) | ((half >> 6) & 7)


def _as_int32(bits: Tensor) -> Tensor:
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits)


@cache
def _bytes_of_scales() -> Tensor:
    """Byte of the layout for e4m3 codes 0 .. 126."""
    code = torch.arange(LARGEST_SCALE + 1)
    # A normal code is (r + 7) << 3 | m. A subnormal one is c * 2^-9: its leading bit, at p, makes r = p - 9.
    leading = (code >= 2).long() + (code >= 4).long()
    subnormal = ((leading - 9 + 23) << 3) | ((code << (3 - leading)) & 7)
    table = torch.where(code >= 8, code + ((23 - 7) << 3), subnormal)
    table[0] = 0
    return table.to(torch.uint8)


@cache
def _scales_of_bytes() -> Tensor:
    """Inverse of _bytes_of_scales; bytes that it never makes go to zero."""
    table = torch.zeros(256, dtype=torch.uint8)
    table[_bytes_of_scales().long()] = torch.arange(LARGEST_SCALE + 1, dtype=torch.uint8)
    return table
