"""The layout "cuda_sm90" of 4-bit weights: tiles of codes and scales, and the exact inverse.

csrc/cuda/sm90/layout/layout.h says where bits lie.

A weight [E, N, K] is [E, row tiles, K tiles, 2048]: tiles of 64 rows x 64 values in the order in which a warpgroup's
threads hold the A operand of wgmma. Scales are tiled alike; scales.py says what is stored of each. Rows and K are
padded to multiples of 64 with codes and scales of value zero; where gated, each half of w13 by itself, as its rows
alternate in groups of eight. So a layer has the shapes of one whose intermediate size is rounded up to 64.

Codes: a thread has 16 of one row and 16 of the row eight below; those at 4 j .. 4 j + 3 of both, 32 bits together,
become word j of the thread. A word is a linear function (over XOR) of those bits, so it is looked up half by half.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_moe_ops.core.kernel_facts import Sm90

TILE = Sm90.TILE_ROWS  # and values of K
CODE_BYTES = Sm90.TILE_CODE_BYTES
_LANES = 16  # of four codes, in a row of a tile


@dataclass(frozen=True)
class Codes:
    """How the eight codes of a thread in one K-step become a word. `encode` and `decode` are inverses, int64 -> int32.

    zero: four codes of value zero, as int16. dtype: of the codes in a checkpoint, the first in the lowest bits.
    """

    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]
    zero: int
    dtype: torch.dtype


def tiles(size: int) -> int:
    """Tiles that hold `size` rows or values of K."""
    return -(-size // TILE)


def tiled_shape(experts: int, rows: int, k: int, gated: bool) -> tuple[int, int, int]:
    """Experts, row tiles and K tiles of a weight with `rows` rows in all; gated: half of them are gate rows."""
    return experts, 2 * tiles(rows // 2) if gated else tiles(rows), tiles(k)


def pack_codes(codes: Tensor, gated: bool, kind: Codes) -> Tensor:
    """kind.dtype [E, N, K in storage], rows [gate; up] where gated -> uint8 [E, row tiles, K tiles, 2048]."""
    experts, rows, _ = codes.shape
    codes = codes.contiguous()
    lanes = (codes.clone() if codes.storage_offset() % 2 else codes).view(torch.int16)
    tables = _tables(kind.encode, codes.device)
    shape = (*tiled_shape(experts, rows, 4 * lanes.shape[2], gated), CODE_BYTES)
    out = codes.new_empty(shape, dtype=torch.uint8)
    for e in range(experts):
        first, second = to_tiles(lanes[e], gated, _LANES, kind.zero).unbind(2)
        words = look_up(tables[0], first) ^ look_up(tables[1], second)  # [row tile, warp, g, K tile, lane]
        out[e].view(torch.int32).unflatten(2, (4, 8, _LANES)).copy_(words.permute(0, 3, 1, 2, 4))
    return out


def unpack_codes(packed: Tensor, rows: int, k: int, gated: bool, kind: Codes) -> Tensor:
    """Inverse of pack_codes for a weight of `rows` rows in all and K = k."""
    tables = _tables(kind.decode, packed.device)
    out = packed.new_empty((packed.shape[0], rows, k // 4), dtype=torch.int16)
    for e in range(packed.shape[0]):
        low, high = packed[e].view(torch.int16).unflatten(2, (4, 8, _LANES, 2)).unbind(5)
        both = look_up(tables[0], low) ^ look_up(tables[1], high)  # [row tile, K tile, warp, g, lane]
        pair = both.unsqueeze(5).view(torch.int16).permute(0, 2, 5, 3, 1, 4)
        from_tiles(pair, gated, out[e])
    return out.view(kind.dtype)


def to_tiles(x: Tensor, gated: bool, width: int, padding: int = 0) -> Tensor:
    """[N, columns] -> [row tile, warp 4, h 2, g 8, K tile, width]: row 16 warp + 8 h + g of its tile.

    Where gated, h says which half of the rows. padding: what rows and columns that do not exist hold.
    """
    halves = x.view(2 if gated else 1, -1, x.shape[1])
    extra_rows, extra_columns = -halves.shape[1] % TILE, -x.shape[1] % width
    padded = F.pad(halves, (0, extra_columns, 0, extra_rows), value=padding) if extra_rows or extra_columns else halves
    if gated:
        return padded.view(2, padded.shape[1] // (TILE // 2), 4, 8, -1, width).permute(1, 2, 0, 3, 4, 5)
    return padded.view(padded.shape[1] // TILE, 4, 2, 8, -1, width)


def from_tiles(tiled: Tensor, gated: bool, out: Tensor) -> None:
    """Inverse of to_tiles, into out [N, columns]."""
    halves = out.view(2 if gated else 1, -1, out.shape[1])
    ordered = tiled.permute(2, 0, 1, 3, 4, 5) if gated else tiled
    whole = ordered.reshape(halves.shape[0], -1, tiled.shape[4] * tiled.shape[5])
    halves.copy_(whole[:, : halves.shape[1], : halves.shape[2]])


def look_up(table: Tensor, index: Tensor) -> Tensor:
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


def _encode_int4(nibbles: Tensor) -> Tensor:
    """int64 -> the stored word: register i's codes at bits 4 i (low half of the register) and 16 + 4 i."""
    word = torch.zeros_like(nibbles)
    for i, (low, high) in enumerate(_REGISTERS):
        word |= ((nibbles >> low) & 15) << 4 * i | ((nibbles >> high) & 15) << (16 + 4 * i)
    return _as_int32(word)


def _decode_int4(word: Tensor) -> Tensor:
    """Inverse of _encode_int4."""
    nibbles = torch.zeros_like(word)
    for i, (low, high) in enumerate(_REGISTERS):
        nibbles |= ((word >> 4 * i) & 15) << low | ((word >> (16 + 4 * i)) & 15) << high
    return _as_int32(nibbles)


E2M1 = Codes(_encode, _decode, 0, torch.uint8)
INT4 = Codes(_encode_int4, _decode_int4, 0x8888 - (1 << 16), torch.int32)
