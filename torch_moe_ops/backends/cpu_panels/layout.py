"""The layout "cpu_panels_v1" of the C++ CPU backend: pack, and the exact inverse.

Output rows go in panels of 16, K in units of 16 elements; a weight is [experts, panels, units, unit].
Gate and up panels of w13 alternate (gate 0, up 0, gate 1, ...). Rows and K that do not fill a panel or
a unit are padded with zeros, each half of w13 by itself; along K with codes that stand for zero. Within a unit:

* 4-bit codes, 128 bytes: [half of K 2][row 16][h 2][b 2], where the byte holds elements 4 b + h (low
  nibble) and 4 b + 2 + h (high nibble) of that half. A 16-bit word shifted by 4 p then has the pair
  (2 p, 2 p + 1) of all rows in neighbouring words.
* 8-bit codes, 256 bytes: [block 4][row / 4][s 2][row % 4][h 2] for element 4 block + 2 s + h. fp6 codes are
  stored as the e4m3 codes of the same values.
* bfloat16, 256 elements: [pair 8][row 16][2]. float16 and float32: [k 16][row 16].

Block scales and zero points are [experts, panels, groups, 16], rows last; scales of 128 x 128 tiles are
[experts, row tiles, groups], where gate and up tiles alternate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_moe_ops.backends.cpu_panels.huge_pages import with_huge_pages
from torch_moe_ops.backends.cpu_panels.numa import interleaved
from torch_moe_ops.core.kernel_facts import CpuPanels

PANEL, UNIT, TILE = CpuPanels.PANEL_ROWS, CpuPanels.UNIT, CpuPanels.TILE


@dataclass(frozen=True)
class Codes:
    """How one kind of code is arranged: `elements` of storage in a unit, `pack` codes in each."""

    elements: int
    pack: int
    forward: Callable[[Tensor], Tensor]  # [panels, 16, units, 16 / pack] -> [panels, units, elements]
    inverse: Callable[[Tensor], Tensor]


# What is moved lies together for some bytes: torch moves those as one number, and bytes one by one.
def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The same bytes in numbers as wide as `dtype`, of which the last dimension has whole ones."""
    x = x.contiguous()
    whole = x.storage_offset() * x.element_size() % dtype.itemsize == 0
    return (x if whole else x.clone()).view(dtype)


# Bits that change places with those `shift` higher, so that eight nibbles of a word are dealt: 0 2 4 6, 1 3 5 7.
_DEALS = ((4, 0x00F000F0), (8, 0x0000FF00))


def _deal_nibbles(words: Tensor, deals: tuple[tuple[int, int], ...] = _DEALS) -> Tensor:
    dealt = words.clone()
    for shift, mask in deals:
        moved = (dealt >> shift).bitwise_xor_(dealt).bitwise_and_(mask)
        dealt.bitwise_xor_(moved).bitwise_xor_(moved.bitwise_left_shift_(shift))
    return dealt


def _codes4(x: Tensor) -> Tensor:
    panels, _, units, _ = x.shape
    words = _deal_nibbles(_as(x, torch.int32))  # [panel, row, unit, half]
    return words.permute(0, 2, 3, 1).reshape(panels, units, 32).view(torch.uint8)


def _codes4_inverse(packed: Tensor) -> Tensor:
    panels, units, _ = packed.shape
    words = _as(packed, torch.int32).reshape(panels, units, 2, PANEL).permute(0, 3, 1, 2).contiguous()
    return _deal_nibbles(words, _DEALS[::-1]).view(torch.uint8)


def _codes8(x: Tensor) -> Tensor:
    panels, _, units, _ = x.shape
    split = _as(x, torch.int16).reshape(panels, 4, 4, units, 4, 2)  # [panel, row / 4, row % 4, unit, block, s]
    return split.permute(0, 3, 4, 1, 5, 2).reshape(panels, units, 128).view(x.dtype)


def _codes8_inverse(packed: Tensor) -> Tensor:
    panels, units, _ = packed.shape
    split = _as(packed, torch.int16).reshape(panels, units, 4, 4, 2, 4)
    return split.permute(0, 3, 5, 1, 2, 4).reshape(panels, PANEL, units, 8).view(packed.dtype)


def _pairs(x: Tensor) -> Tensor:
    panels, _, units, _ = x.shape
    return _as(x, torch.int32).permute(0, 2, 3, 1).reshape(panels, units, 128).view(x.dtype)


def _pairs_inverse(packed: Tensor) -> Tensor:
    panels, units, _ = packed.shape
    pairs = _as(packed, torch.int32).reshape(panels, units, 8, PANEL).permute(0, 3, 1, 2)
    return pairs.contiguous().view(packed.dtype)


def _columns(x: Tensor) -> Tensor:
    panels, _, units, _ = x.shape
    return x.permute(0, 2, 3, 1).reshape(panels, units, 256)


def _columns_inverse(packed: Tensor) -> Tensor:
    panels, units, _ = packed.shape
    return packed.reshape(panels, units, 16, PANEL).permute(0, 3, 1, 2)


_CODES4 = Codes(128, 2, _codes4, _codes4_inverse)
_CODES8 = Codes(256, 1, _codes8, _codes8_inverse)
_PAIRS = Codes(256, 1, _pairs, _pairs_inverse)
_COLUMNS = Codes(256, 1, _columns, _columns_inverse)


@dataclass(frozen=True)
class SchemeLayout:
    """What the layout does with one scheme."""

    codes: Codes | None = None  # None: by dtype
    dtype: torch.dtype | None = None  # None: the weight's own
    group: int = 0  # elements of K per block scale; 0: as many as the scales say
    scale_dtype: torch.dtype | None = None  # None: no scales, or any float dtype
    tiles: bool = False  # one scale per 128 x 128


# By the kernels' names of schemes (pack.py).
LAYOUTS: dict[str, SchemeLayout] = {
    "none": SchemeLayout(),
    "nvfp4": SchemeLayout(_CODES4, torch.uint8, 16, torch.float8_e4m3fn),
    "mxfp4": SchemeLayout(_CODES4, torch.uint8, 32, torch.uint8),
    "mxint4": SchemeLayout(_CODES4, torch.uint8, 32, torch.bfloat16),
    "int4": SchemeLayout(_CODES4, torch.uint8),
    "mxfp8": SchemeLayout(_CODES8, torch.float8_e4m3fn, 32, torch.uint8),
    "mxfp6": SchemeLayout(_CODES8, torch.uint8, 32, torch.uint8),
    "fp8": SchemeLayout(_CODES8, torch.float8_e4m3fn),
    "fp8_block": SchemeLayout(_CODES8, torch.float8_e4m3fn, 128, torch.float32, tiles=True),
    "int8": SchemeLayout(_CODES8, torch.int8),
}


def _codes_of(scheme: str, dtype: torch.dtype) -> Codes:
    return LAYOUTS[scheme].codes or (_PAIRS if dtype == torch.bfloat16 else _COLUMNS)


def fp6_to_e4m3(codes: Tensor, element: str) -> Tensor:
    """fp6 codes, one a byte -> uint8 e4m3 codes of the same values. element: "e3m2" or "e2m3"."""
    return _fp6_table(element)[codes.long()]


def e4m3_to_fp6(codes: Tensor, element: str) -> Tensor:
    """Inverse of fp6_to_e4m3."""
    inverse = torch.zeros(256, dtype=torch.uint8)
    inverse[_fp6_table(element).long()] = torch.arange(64, dtype=torch.uint8)
    return inverse[codes.long()]


def _fp6_table(element: str) -> Tensor:
    """The e4m3 code of every fp6 code. Each value is one of e4m3's: as many mantissa bits, fewer exponents."""
    mantissa_bits, bias = {"e3m2": (2, 3), "e2m3": (3, 1)}[element]
    code = torch.arange(64)
    mantissa = (code & ((1 << mantissa_bits) - 1)).float()
    exponent = (code & 31) >> mantissa_bits
    fraction = mantissa / (1 << mantissa_bits) + (exponent > 0)
    magnitude = fraction * torch.exp2((exponent.clamp(min=1) - bias).float())
    value = torch.where(code >= 32, -magnitude, magnitude)
    return value.to(torch.float8_e4m3fn).view(torch.uint8)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def packed_shapes(
    scheme: str,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    gated: bool,
    weight_dtype: torch.dtype,
    scale_dtype: torch.dtype | None = None,
    group: int = 0,
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of w13 and w2, and of w13_scale and w2_scale where the scheme has them.

    scale_dtype and group (elements of K per scale, 0 for a whole row) say what int4, int8 and fp8 leave open;
    without a scale_dtype those have no scales here.
    """
    layout = LAYOUTS[scheme]
    dtype = layout.dtype or weight_dtype
    scale_dtype = layout.scale_dtype or scale_dtype
    halves = 2 if gated else 1
    table: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    sizes = (("w13", halves, intermediate_size, hidden_size), ("w2", 1, hidden_size, intermediate_size))
    for name, copies, rows, k in sizes:
        panels = copies * _ceil(rows, PANEL)
        groups = _ceil(k, layout.group or group or k)
        table[name] = ((num_experts, panels, _ceil(k, UNIT), _codes_of(scheme, dtype).elements), dtype)
        if layout.tiles:
            table[f"{name}_scale"] = ((num_experts, copies * _ceil(rows, TILE), groups), torch.float32)
        elif scale_dtype is not None:
            table[f"{name}_scale"] = ((num_experts, panels, groups, PANEL), scale_dtype)
    return table


def intermediate_size_of(scheme: str, w2_shape: tuple[int, ...]) -> int:
    """The intermediate size, rounded up to a multiple of 16, from the packed shape of w2."""
    return int(w2_shape[2]) * UNIT


def pack_weight(scheme: str, rows: Tensor, gated: bool, fill: Tensor | None = None) -> Tensor:
    """[E, N, K storage] -> [E, panels, units, unit]; gated: rows are [gate; up].

    fill: [E, N, 1], what each row is padded with along K; None: 0.
    """
    codes = _codes_of(scheme, rows.dtype)
    missing = -rows.shape[2] % (UNIT // codes.pack)
    if fill is not None and missing:
        rows = torch.cat((rows, fill.expand(-1, -1, missing)), 2)
    return _expert_by_expert(rows, gated, lambda half: codes.forward(_tile(half, UNIT // codes.pack)))


def unpack_weight(scheme: str, packed: Tensor, size_n: int, size_k: int, gated: bool) -> Tensor:
    """Inverse of pack_weight for N = size_n rows in all and size_k logical elements of K."""
    codes = _codes_of(scheme, packed.dtype)
    return _rows_back(packed, gated, size_n, size_k // codes.pack, codes.inverse)


def pack_scale(scheme: str, scale: Tensor, gated: bool) -> Tensor:
    """Block scales or zero points [E, N, groups] -> [E, panels, groups, 16]; tiles [E, row tiles, groups] stay 3-d."""
    if LAYOUTS[scheme].tiles:
        return scale.unflatten(1, (2 if gated else 1, -1)).transpose(1, 2).flatten(1, 2).contiguous()
    return _expert_by_expert(scale, gated, lambda half: _tile(half, 1).squeeze(3).transpose(1, 2))


def unpack_scale(scheme: str, packed: Tensor, size_n: int, groups: int, gated: bool) -> Tensor:
    """Inverse of pack_scale for N = size_n rows of weights in all and `groups` scales along K."""
    if LAYOUTS[scheme].tiles:
        return packed.unflatten(1, (-1, 2 if gated else 1)).transpose(1, 2).flatten(1, 2).contiguous()
    return _rows_back(packed, gated, size_n, groups, lambda x: x.transpose(1, 2).unsqueeze(3))


def _tile(half: Tensor, width: int) -> Tensor:
    """[N, K] -> [panels, 16, units, width], padded with zeros."""
    rows, columns = half.shape
    panels, units = _ceil(rows, PANEL), _ceil(columns, width)
    if (panels * PANEL, units * width) != (rows, columns):
        padded = half.new_zeros((panels * PANEL, units * width))
        padded[:rows, :columns] = half
        half = padded
    return half.reshape(panels, PANEL, units, width)


def _bits(x: Tensor) -> Tensor:
    """The same bytes in an integer dtype: torch permutes and pads those on every version."""
    by_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return x if x.dtype == torch.uint8 else x.view(by_size[x.element_size()])


def _expert_by_expert(x: Tensor, gated: bool, pack_half: Callable[[Tensor], Tensor]) -> Tensor:
    """Packs one expert at a time into one output, so that peak memory is the result plus an expert."""
    bits = _bits(x.contiguous())
    halves = 2 if gated else 1
    out: Tensor | None = None
    for e in range(x.shape[0]):
        parts = [pack_half(half) for half in bits[e].chunk(halves)]
        if out is None:
            panels, *rest = parts[0].shape
            out = interleaved(with_huge_pages(bits.new_empty((x.shape[0], panels, halves, *rest))))
        for half, part in enumerate(parts):
            out[e, :, half] = part
    if out is None:
        raise ValueError("num_experts must be at least 1, got 0")
    return out.flatten(1, 2).view(x.dtype)


def _rows_back(
    packed: Tensor, gated: bool, size_n: int, columns: int, unpack_half: Callable[[Tensor], Tensor]
) -> Tensor:
    bits = _bits(packed)
    halves = 2 if gated else 1
    rows = size_n // halves
    out = bits.new_empty((packed.shape[0], size_n, columns))
    for e in range(packed.shape[0]):
        for half in range(halves):
            whole = unpack_half(bits[e, half::halves]).flatten(2).flatten(0, 1)
            out[e, half * rows : (half + 1) * rows] = whole[:rows, :columns]
    return out.view(packed.dtype)
