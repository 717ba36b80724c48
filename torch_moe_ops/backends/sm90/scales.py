"""Scales of the layout "cuda_sm90": what is stored of each, expert by expert, and the exact inverse.

All are tiled as the codes are (`to_tiles`), the row eight below beside each: [E, row tiles, K tiles, in a tile], where
tiles of groups larger than a tile are repeated: [E, row tiles, groups, repeats, in a tile].

- nvfp4, uint8, four blocks of a row in a tile: (r + 23) << 3 | m for the e4m3 scale 2^r * (1 + m / 8), 0 for zero.
- mxfp4, uint8, two: the exponent byte as it is.
- int4 and mxint4 with bfloat16 scales and no zero points, bfloat16, two or one: the scale times 2^112, or 2^108 in the
  row eight below, as the decoder's codes of that row are 16 times as large.
- int4 with zero points or float16 scales, int32, two or one: such a product as the sum of two bfloat16, the nearest one
  in the low half, the rest in the high half. That needs the upper ten bits; below: bit 5, a float16 scale; bit 4, there
  are zero points; bits 0 to 3, the zero point. Where all scales are bfloat16, so that there is no rest, and one in a
  tile, those of both rows are one int64: kernels are told by that.
- int4 with float32 scales, int64, one: such a product in the low half, in float32; the flags in the high half are those
  of above, and bit 6, a float32 scale.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from torch_moe_ops.backends.sm90.layout import TILE, from_tiles, look_up, tiled_shape, to_tiles
from torch_moe_ops.core.kernel_facts import SM90_FORMATS, TileScales
from torch_moe_ops.numerics.int4 import SYMMETRIC_ZERO

_NVFP4, _MXFP4 = SM90_FORMATS["nvfp4"].in_row, SM90_FORMATS["mxfp4"].in_row
LARGEST_E4M3 = 126  # code of 448
LARGEST_EXPONENT = 160  # of e8m0: 2^33
LARGEST_INT4 = 65280  # the largest bfloat16 below 2^16
_FLOAT32, _FLOAT16, _ZERO_POINTS = 64, 32, 16  # bits of an int4 scale
_REST = -1 << 22  # the upper ten bits
_DTYPES = {2: torch.bfloat16, 4: torch.int32, 8: torch.int64}  # by bytes of a scale


def pack_nvfp4(scales: Tensor, gated: bool, name: str) -> Tensor:
    """float8_e4m3fn [E, N, K / 16] -> uint8 [E, row tiles, K tiles, 256].

    Raises ValueError in the name of the argument where a scale is negative, -0 or NaN: no byte stands for it.
    """
    codes = scales.contiguous().view(torch.uint8)
    need = f"positive finite scales or zero (e4m3 codes up to {LARGEST_E4M3:#x})"
    return _pack_bytes(codes, gated, _NVFP4, _bytes_of_e4m3(codes.device), f"{name} must hold {need}", LARGEST_E4M3)


def unpack_nvfp4(packed: Tensor, rows: int, k: int, gated: bool) -> Tensor:
    """Inverse of pack_nvfp4 for a weight of `rows` rows in all and K = k."""
    out = packed.new_empty((packed.shape[0], rows, k // 16))
    table = _e4m3_of_bytes(packed.device)
    for e in range(packed.shape[0]):
        from_tiles(_in_rows(look_up(table, packed[e]), _NVFP4), gated, out[e])
    return out.view(torch.float8_e4m3fn)


def pack_mxfp4(scales: Tensor, gated: bool, name: str) -> Tensor:
    """uint8 [E, N, K / 32] -> uint8 [E, row tiles, K tiles, 128].

    Raises ValueError where an exponent is NaN or above 2^33: bfloat16 operands could not hold it.
    """
    text = f"{name} must hold exponents of at most 2^33 (byte {LARGEST_EXPONENT:#x})"
    return _pack_bytes(scales.contiguous(), gated, _MXFP4, None, text, LARGEST_EXPONENT)


def unpack_mxfp4(packed: Tensor, rows: int, k: int, gated: bool) -> Tensor:
    """Inverse of pack_mxfp4 for a weight of `rows` rows in all and K = k."""
    out = packed.new_empty((packed.shape[0], rows, k // 32))
    for e in range(packed.shape[0]):
        from_tiles(_in_rows(packed[e], _MXFP4), gated, out[e])
    return out


def _pack_bytes(codes: Tensor, gated: bool, blocks: int, table: Tensor | None, text: str, most: int) -> Tensor:
    experts, rows, columns = codes.shape
    out = codes.new_empty((*tiled_shape(experts, rows, TILE // blocks * columns, gated), TILE * blocks))
    for e in range(experts):
        if int(codes[e].max()) > most:
            wrong = int(codes[e][codes[e] > most][0])
            raise ValueError(f"backend 'cuda_sm90': {text}, got code {wrong:#x} in expert {e}")
        of_expert = codes[e] if table is None else look_up(table, codes[e])
        out[e].copy_(_in_tiles(to_tiles(of_expert, gated, blocks)))
    return out


def pack_int4(scales: Tensor, zero_points: Tensor | None, k: int, gated: bool, name: str, kind: TileScales) -> Tensor:
    """Scales [E, N, groups] of K = k -> [E, row tiles, groups, repeats, kind.in_tile].

    kind: one of SM90_FORMATS, the same for w13 and w2. Its elements are wider than bfloat16 where there are zero points
    (uint8, shaped like scales), float16 or float32 scales.
    Raises ValueError where a scale is infinite, NaN or above 65280 in magnitude.
    """
    experts, rows, columns = scales.shape
    _, row_tiles, k_tiles = tiled_shape(experts, rows, k, gated)
    groups = k_tiles if columns > k_tiles else columns
    blocks, dtype = kind.in_row, _DTYPES[kind.each // kind.rows]
    out = scales.new_empty((experts, row_tiles, groups, k_tiles // groups, TILE * blocks), dtype=dtype)
    for e in range(experts):
        wrong = scales[e][~(scales[e].abs() <= LARGEST_INT4)]
        if wrong.numel():
            text = f"{name} must hold finite scales of at most {LARGEST_INT4}"
            raise ValueError(f"backend 'cuda_sm90_int4': {text}, got {float(wrong[0])} in expert {e}")
        scaled = to_tiles(scales[e].float().contiguous(), gated, blocks) * _units(scales.device)
        stored = scaled.to(torch.bfloat16)
        if dtype != torch.bfloat16:
            zero = None if zero_points is None else to_tiles(zero_points[e].contiguous(), gated, blocks, SYMMETRIC_ZERO)
            low = _points(zero, scales.dtype)
            stored = _wide(scaled, stored, low) if dtype == torch.int32 else _float32(scaled, low)
        out[e].copy_(_in_tiles(stored).unsqueeze(2))
    return out.view(torch.int64) if kind.rows == 2 else out


def unpack_int4(packed: Tensor, rows: int, k: int, gated: bool) -> tuple[Tensor, Tensor | None]:
    """Inverse of pack_int4: scales, and zero points where there are any."""
    packed = packed.view(torch.int32) if holds_two_rows(packed) else packed
    experts, _, groups, _, count = packed.shape
    blocks = count // TILE
    columns = k // (TILE // 2) if blocks == 2 else groups
    points_at = {torch.bfloat16: 0, torch.int32: 16, torch.int64: 32}[packed.dtype]
    flags = int(packed.flatten()[0]) >> points_at if points_at else 0
    if packed.dtype == torch.int64 and flags & _FLOAT32:
        dtype = torch.float32
    else:
        dtype = torch.float16 if flags & _FLOAT16 else torch.bfloat16
    out = packed.new_empty((experts, rows, columns), dtype=dtype)
    zero = packed.new_empty(out.shape, dtype=torch.uint8) if flags & _ZERO_POINTS else None
    for e in range(experts):
        of_expert = _in_rows(packed[e, :, :, 0], blocks)
        scaled = _scaled_of(of_expert)
        from_tiles((scaled / _units(packed.device)).to(out.dtype), gated, out[e])
        if zero is not None:
            from_tiles(((of_expert >> points_at) & 15).to(torch.uint8), gated, zero[e])
    return out, zero


def holds_two_rows(packed: Tensor) -> bool:
    """Whether an element has the scales of two rows, each of 32 bits; else one of 64 bits is a float32 scale's."""
    return packed.dtype == torch.int64 and packed.shape[-1] < TILE


def int4_shapes(experts: int, rows: int, k: int, gated: bool, kind: TileScales) -> tuple[tuple[int, ...], ...]:
    """What pack_int4 may return: one group in each tile (or two), in two tiles, and one in all."""
    *outer, k_tiles = tiled_shape(experts, rows, k, gated)
    groups = {k_tiles} if kind.in_row == 2 else {k_tiles, max(k_tiles // 2, 1), 1}
    return tuple((*outer, g, k_tiles // g, kind.in_tile) for g in sorted(groups, reverse=True) if k_tiles % g == 0)


def _points(zero: Tensor | None, dtype: torch.dtype) -> Tensor | int:
    """Zero points, and what a scale was, int32."""
    flags = {torch.float32: _FLOAT32, torch.float16: _FLOAT16}.get(dtype, 0)
    return SYMMETRIC_ZERO | flags if zero is None else zero.int() | (flags | _ZERO_POINTS)


def _wide(scaled: Tensor, nearest: Tensor, points: Tensor | int) -> Tensor:
    rest = (scaled - nearest.float()).to(torch.bfloat16).view(torch.int16).int()
    return (nearest.view(torch.int16).int() & 0xFFFF) | (rest | points) << 16


def _float32(scaled: Tensor, points: Tensor | int) -> Tensor:
    high = points.long() if isinstance(points, Tensor) else points
    return (scaled.view(torch.int32).long() & 0xFFFFFFFF) | high << 32


def _scaled_of(stored: Tensor) -> Tensor:
    """What is stored of scales in any of these forms, float32; a scale of -0 keeps its sign."""
    if stored.dtype == torch.bfloat16:
        return stored.float()
    if stored.dtype == torch.int64:
        return stored.to(torch.int32).view(torch.float32)
    nearest, rest = ((bits << 16).view(torch.float32) for bits in (stored, (stored & _REST) >> 16))
    return torch.where(rest == 0, nearest, nearest + rest)


def _in_tiles(tiled: Tensor) -> Tensor:
    """What to_tiles makes of scales -> [row tiles, K tiles, in a tile]."""
    return tiled.permute(0, 4, 1, 3, 5, 2).flatten(2)


def _in_rows(stored: Tensor, blocks: int) -> Tensor:
    """Inverse of _in_tiles."""
    return stored.unflatten(2, (4, 8, blocks, 2)).permute(0, 2, 5, 3, 1, 4)


@cache
def _units(device: torch.device) -> Tensor:
    """What the scales of rows g and g + 8 are multiplied by, in the order of to_tiles."""
    return torch.tensor([2.0**112, 2.0**108], dtype=torch.float32, device=device).view(2, 1, 1, 1)


@cache
def _bytes_of_e4m3(device: torch.device) -> Tensor:
    """Byte of the layout for e4m3 codes 0 .. 126."""
    code = torch.arange(LARGEST_E4M3 + 1)
    # A normal code is (r + 7) << 3 | m. A subnormal one is c * 2^-9: its leading bit, at p, makes r = p - 9.
    leading = (code >= 2).long() + (code >= 4).long()
    subnormal = ((leading - 9 + 23) << 3) | ((code << (3 - leading)) & 7)
    table = torch.where(code >= 8, code + ((23 - 7) << 3), subnormal)
    table[0] = 0
    return table.to(torch.uint8).to(device)


@cache
def _e4m3_of_bytes(device: torch.device) -> Tensor:
    """Inverse of _bytes_of_e4m3; bytes that it never makes go to zero."""
    table = torch.zeros(256, dtype=torch.uint8)
    table[_bytes_of_e4m3(torch.device("cpu")).long()] = torch.arange(LARGEST_E4M3 + 1, dtype=torch.uint8)
    return table.to(device)
