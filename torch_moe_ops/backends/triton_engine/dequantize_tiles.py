"""Packed weights of the layout "cuda_sm90" -> numbers in their own order, in one pass over memory.

csrc/cuda/sm90/layout/layout.h says where bits lie; 4-bit codes, in tiles of 64 rows by 64 values of K.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_moe_ops.backends.sm90.scales import holds_two_rows
from torch_moe_ops.backends.triton_engine.backward_pass import Decoder
from torch_moe_ops.backends.triton_engine.decode_scales import spread
from torch_moe_ops.backends.triton_engine.decode_words import four_natural
from torch_moe_ops.backends.triton_engine.dequantize import store_scaled
from torch_moe_ops.backends.triton_engine.elements import decode_e2m1
from torch_moe_ops.backends.triton_engine.known import Repeated
from torch_moe_ops.backends.triton_engine.plan import target_of
from torch_moe_ops.core.schemes import ceil_div

E2M1_UNIT = 2.0**38  # codes come out as 2^-126, scales as 2^88
_TILES = 2  # tiles along K that a program decodes
_FIELDS = tl.constexpr(0x81C081C0 - (1 << 32))


def _registers() -> str:
    """PTX: four codes of a row, $0 to $3, times $9, and of the one eight below, $4 to $7, times $10, in the word $8."""
    take = (
        ("shl.b32 a, $8, 6;", "s", 0),
        ("shl.b32 a, $8, 2;", "t", 4),
        ("shf.r.wrap.b32 a, $8, $8, 4;", "s", 2),
        ("shr.u32 a, $8, 8; xor.b32 a, a, $8;", "t", 6),
    )
    text = "{\n.reg .b32 a, s, t, z;\nmov.b32 s, {$9, $9}; mov.b32 t, {$10, $10}; mov.b32 z, 0x80008000;\n"
    for how, factor, first in take:
        text += (
            f"{how} and.b32 a, a, 0x81C081C0; fma.rn.bf16x2 a, a, {factor}, z; mov.b32 {{${first}, ${first + 1}}}, a;\n"
        )
    return text + "}\n"


_REGISTERS = tl.constexpr(_registers())
_OPERANDS = tl.constexpr(",".join(["=h"] * 8) + ",r,h,h")


@triton.jit
def _e2m1_pair(register, INDEX: tl.constexpr):
    """float32 value of a register's low (0) or high (1) code, whose bits are at 15 and 8..6 of its half."""
    half = register >> (16 * INDEX)
    return decode_e2m1(((half >> 12) & 8) | ((half >> 6) & 7))


@triton.jit
def _e2m1_factor(byte, SCALE: tl.constexpr):
    """2^88 times the scale that a byte (int32) stands for, float32."""
    bits = (byte + 88) << 7
    if SCALE == "e4m3":
        bits = tl.where(byte == 0, 0, (byte << 4) + 0x6000)
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _e2m1_words(word, upper, lower, USE_PTX: tl.constexpr, DTYPE: tl.constexpr):
    """Eight values of each word over 2^38, four of either row; upper, lower: 2^88 times their scales, float32."""
    if USE_PTX and tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(
            _REGISTERS, _OPERANDS, [word, upper.to(tl.bfloat16), lower.to(tl.bfloat16)], (tl.bfloat16,) * 8,
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        unsigned = word.to(tl.uint32, bitcast=True)
        v0 = (word << 6) & _FIELDS
        v1 = (word << 2) & _FIELDS
        v2 = ((unsigned >> 4) | (unsigned << 28)).to(tl.int32, bitcast=True) & _FIELDS
        v3 = (word ^ (unsigned >> 8).to(tl.int32, bitcast=True)) & _FIELDS
        s = upper * 1.1754943508222875e-38
        t = lower * 1.1754943508222875e-38
        return (
            _e2m1_pair(v0, 0) * s, _e2m1_pair(v0, 1) * s, _e2m1_pair(v2, 0) * s, _e2m1_pair(v2, 1) * s,
            _e2m1_pair(v1, 0) * t, _e2m1_pair(v1, 1) * t, _e2m1_pair(v3, 0) * t, _e2m1_pair(v3, 1) * t,
        )  # fmt: skip


@triton.jit
def _int4_words(word, upper, lower, upper_zero, lower_zero):
    """Eight values of each word, float32, four of either row; scales and zero points float32."""
    return (
        ((word & 15).to(tl.float32) - upper_zero) * upper,
        (((word >> 16) & 15).to(tl.float32) - upper_zero) * upper,
        (((word >> 8) & 15).to(tl.float32) - upper_zero) * upper,
        (((word >> 24) & 15).to(tl.float32) - upper_zero) * upper,
        (((word >> 4) & 15).to(tl.float32) - lower_zero) * lower,
        (((word >> 20) & 15).to(tl.float32) - lower_zero) * lower,
        (((word >> 12) & 15).to(tl.float32) - lower_zero) * lower,
        (((word >> 28) & 15).to(tl.float32) - lower_zero) * lower,
    )


@triton.jit
def _int4_scale(stored, UNIT: tl.constexpr):
    """(scale, zero point), float32, of one in any form, UNIT times itself (sm90/scales.py)."""
    if tl.int64 == stored.dtype:
        scaled = stored.to(tl.int32).to(tl.float32, bitcast=True)
        return scaled * (1.0 / UNIT), ((stored >> 32) & 15).to(tl.float32)
    elif tl.int32 == stored.dtype:
        near = (stored << 16).to(tl.float32, bitcast=True)
        rest = (stored & -4194304).to(tl.float32, bitcast=True)
        return (near + rest) * (1.0 / UNIT), ((stored >> 16) & 15).to(tl.float32)
    else:
        return stored.to(tl.float32) * (1.0 / UNIT), 8.0


@triton.jit
def tile_values(
    w_ptr, scale_ptr, at_tile, first, SCALE: tl.constexpr, IN_ROW: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr,
    DTYPE: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """A row of tiles' values from tile `first` along K on: (upper, lower) [32, 64 * TILES], row eight below in `lower`.

    at_tile: the number of the row's first tile. Values lack the alphas and what dequantize_tiles returns; bfloat16 if
    DTYPE is, or float32.
    """
    tiles_k: tl.constexpr = (K + 63) // 64
    lanes: tl.constexpr = 16 * TILES
    pair = tl.arange(0, 32)
    lane = tl.arange(0, lanes)
    tile = first + lane // 16
    word = tl.load(
        w_ptr + at_tile * 512 + pair[:, None] * 16 + (tile * 512 + lane % 16)[None, :],
        mask=(tile < tiles_k)[None, :], other=0,
    )  # fmt: skip
    group = tl.arange(0, TILES * IN_ROW)
    tile_of_group = first + group // IN_ROW
    at_scale = ((at_tile + tile_of_group) * (32 * IN_ROW) + group % IN_ROW)[None, :] + pair[:, None] * IN_ROW
    live = (tile_of_group < tiles_k)[None, :]
    upper = tl.load(scale_ptr + 2 * at_scale, mask=live, other=0)
    lower = tl.load(scale_ptr + 2 * at_scale + 1, mask=live, other=0)
    if SCALE == "int4":
        s, zero_s = _int4_scale(upper, 5192296858534827628530496329220096.0)  # 2^112
        t, zero_t = _int4_scale(lower, 324518553658426726783156020576256.0)  # 2^108
        s = spread(s, 32, lanes)
        t = spread(t, 32, lanes)
        if tl.bfloat16 != upper.dtype:
            zero_s = spread(zero_s, 32, lanes)
            zero_t = spread(zero_t, 32, lanes)
        a0, a1, a2, a3, b0, b1, b2, b3 = _int4_words(word, s, t, zero_s, zero_t)
    else:
        s = spread(_e2m1_factor(upper.to(tl.int32), SCALE), 32, lanes)
        t = spread(_e2m1_factor(lower.to(tl.int32), SCALE), 32, lanes)
        a0, a1, a2, a3, b0, b1, b2, b3 = _e2m1_words(word, s, t, USE_PTX, DTYPE)
    return four_natural(a0, a1, a2, a3, 32, lanes), four_natural(b0, b1, b2, b3, 32, lanes)


@triton.jit
def tile_rows(row_tile, N: tl.constexpr, GATED: tl.constexpr):
    """(upper rows, lower rows) [32] of a tile, of N in all: of gate and of up if GATED."""
    pair = tl.arange(0, 32)
    if GATED:
        upper = row_tile * 32 + pair
        lower = upper + N // 2
    else:
        upper = row_tile * 64 + pair // 8 * 16 + pair % 8
        lower = upper + 8
    return upper, lower


@triton.jit(do_not_specialize=["first_expert", "first_tile"])
def dequantize_tiles_kernel(
    w_ptr,
    scale_ptr,
    alpha_ptr,
    out_ptr,
    first_expert,
    first_tile,
    SCALE: tl.constexpr,
    IN_ROW: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
    ROW_TILES: tl.constexpr,
    ALPHAS: tl.constexpr,
    UNIT: tl.constexpr,
    TILES: tl.constexpr,
    USE_PTX: tl.constexpr,
):
    """out [count, N, WIDTH] = weights of experts from `first_expert` on, from `first_tile` along K on.

    Grid: (count * ROW_TILES, cdiv(tiles of WIDTH, TILES)).

    w: int32 words [E, ROW_TILES, tiles along K, 512]. N: rows in all, [gate; up] where GATED, without padding.
    SCALE: "e4m3", "e8m0" or "int4"; IN_ROW: scales in a row of a tile. scale: [E, ROW_TILES, tiles along K,
    64 * IN_ROW], each with that of the row eight below beside it. alpha: see store_scaled.
    """
    tiles_k: tl.constexpr = (K + 63) // 64
    place = (tl.program_id(0) // ROW_TILES).to(tl.int64)
    expert = first_expert + place
    row_tile = tl.program_id(0) % ROW_TILES
    first = first_tile + tl.program_id(1) * TILES
    at_tile = (expert * ROW_TILES + row_tile) * tiles_k
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    upper, lower = tile_values(w_ptr, scale_ptr, at_tile, first, SCALE, IN_ROW, K, TILES, dtype, USE_PTX)
    above, below = tile_rows(row_tile, N, GATED)
    k = tl.program_id(1) * (64 * TILES) + tl.arange(0, 64 * TILES)
    mask = (above < (N // 2 if GATED else N))[:, None] & (k < WIDTH)[None, :]
    at = (place * N + above)[:, None] * WIDTH + k[None, :]
    store_scaled(upper, out_ptr, at, mask, expert, above, alpha_ptr, ALPHAS, N, UNIT, USE_PTX)
    if not GATED:
        mask = (below < N)[:, None] & (k < WIDTH)[None, :]
    at = (place * N + below)[:, None] * WIDTH + k[None, :]
    store_scaled(lower, out_ptr, at, mask, expert, below, alpha_ptr, ALPHAS, N, UNIT, USE_PTX)


_SCALES = {"nvfp4": "e4m3", "mxfp4": "e8m0", "mxint4": "int4", "int4": "int4"}


def kind_of(scheme: str) -> tuple[str, float]:
    """(SCALE of the kernels, what values without alphas have to be multiplied by)."""
    kind = _SCALES[scheme]
    return kind, 1.0 if kind == "int4" else E2M1_UNIT


def as_read(scale: Tensor) -> Tensor:
    """Scales of the layout as the kernels read them, each for itself: those of two rows may be one int64."""
    return scale.view(torch.int32) if holds_two_rows(scale) else scale


def tiles_decoder(
    weight: Tensor, scale: Tensor, scale_2: Tensor | None, scheme: str, gated: bool, space: Tensor
) -> Decoder:
    """As `dequantize.decoder`, of weight uint8 [E, row tiles, K tiles, 2048] and the layout's scales."""
    _, n, width = space.shape
    experts, row_tiles, tiles_k, _ = weight.shape
    kind, unit = kind_of(scheme)
    scale = as_read(scale)
    alphas = 0 if scale_2 is None else scale_2.numel() // experts
    launch = Repeated(
        dequantize_tiles_kernel,
        (weight.view(torch.int32), scale, space if scale_2 is None else scale_2, space),
        SCALE=kind,
        IN_ROW=scale.shape[-1] // 64,
        N=n,
        K=64 * tiles_k,
        WIDTH=width,
        GATED=gated,
        ROW_TILES=row_tiles,
        ALPHAS=alphas,
        UNIT=unit,
        TILES=_TILES,
        USE_PTX=target_of(space.device)["USE_PTX"],
    )
    columns = ceil_div(width, 64 * _TILES)

    def run(first: int, count: int, column: int) -> None:
        launch((count * row_tiles, columns), first, column // 64)

    return Decoder(1.0 if alphas else unit, run)
