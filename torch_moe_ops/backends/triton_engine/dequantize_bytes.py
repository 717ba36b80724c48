"""Weights of 8 bits in the layout "cuda_sm90" -> numbers in their own order, in one pass over memory.

csrc/cuda/sm90/layout/w4a8_layout.h says where bytes lie, in tiles of 64 rows by 128 values of K.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_moe_ops.backends.triton_engine.backward_pass import Decoder
from torch_moe_ops.backends.triton_engine.decode_words import decode_words
from torch_moe_ops.backends.triton_engine.elements import narrow
from torch_moe_ops.backends.triton_engine.formats import stored_format
from torch_moe_ops.backends.triton_engine.known import Repeated
from torch_moe_ops.backends.triton_engine.plan import target_of
from torch_moe_ops.core.schemes import ceil_div


@triton.jit(do_not_specialize=["first_expert", "first_tile"])
def dequantize_bytes_kernel(
    w_ptr,
    scale_ptr,
    out_ptr,
    first_expert,
    first_tile,
    FORMAT: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES_K: tl.constexpr,
    GATED: tl.constexpr,
    ROW_TILES: tl.constexpr,
    EXPERT: tl.constexpr,
    HALF: tl.constexpr,
    ROW: tl.constexpr,
    USE_PTX: tl.constexpr,
):
    """out [count, N, WIDTH] = weights of experts from `first_expert` on, from `first_tile` along K on.

    Grid: (count * ROW_TILES, tiles of WIDTH).

    w: int32 words [E, ROW_TILES, TILES_K, 2048]. N: rows in all, [gate; up] where GATED, without padding. scale:
    uint8 [E, ROW_TILES, TILES_K, 256], or float32, EXPERT, HALF and ROW from one expert, half of the rows and
    row or, where FORMAT has tiles of scales, 128 rows to the next.
    """
    number = (tl.program_id(0) // ROW_TILES).to(tl.int64)
    expert = first_expert + number
    row_tile = tl.program_id(0) % ROW_TILES
    tile = first_tile + tl.program_id(1)
    at_tile = (expert * ROW_TILES + row_tile) * TILES_K + tile
    place = tl.arange(0, 64)  # of a row in the tile
    sixteen = place // 16
    lower = place // 8 % 2
    g = place % 8
    word = tl.arange(0, 32)  # in the order of K
    piece = (word // 16 * 4 + word % 4)[None, :] ^ g[:, None]
    packed = tl.load(w_ptr + at_tile * 2048 + place[:, None] * 32 + piece * 4 + (word % 16 // 4)[None, :])
    zero = tl.full((64, 1), 0, tl.uint8)
    scale = zero  # nothing reads it where values are scaled below
    if FORMAT.scaled:
        block = tl.arange(0, 4)
        of_row = (sixteen * 32 + g * 4 + lower)[:, None]
        scale = tl.load(scale_ptr + at_tile * 256 + (block // 2 * 128 + block % 2 * 2)[None, :] + of_row)
    value = decode_words(packed, scale, zero, FORMAT, out_ptr.dtype.element_ty, 64, 32, USE_PTX, True)
    rows: tl.constexpr = N // 2 if GATED else N
    row = row_tile * 32 + sixteen * 8 + g if GATED else row_tile * 64 + sixteen * 16 + 2 * g + lower
    half = lower if GATED else tl.zeros_like(lower)
    if not FORMAT.scaled:
        at = expert * EXPERT + half * HALF
        if FORMAT.scale == "tile":
            at += tl.minimum(row, rows - 1) // 128 * ROW + tile
        else:
            at += tl.minimum(row, rows - 1) * ROW
        unit: tl.constexpr = FORMAT.unit
        value = value.to(tl.float32) * (tl.load(scale_ptr + at) * unit)[:, None]
    if value.dtype != out_ptr.dtype.element_ty:
        value = narrow(value, out_ptr.dtype.element_ty, USE_PTX)
    k = tl.program_id(1) * 128 + tl.arange(0, 128)
    to = (number * N + half * rows + row)[:, None] * WIDTH + k[None, :]
    tl.store(out_ptr + to, value, mask=(row < rows)[:, None] & (k < WIDTH)[None, :])


def _steps(scale: Tensor, blocks: bool, halves: int) -> tuple[int, int, int]:
    """How far apart the scales of two experts, of halves of rows, and of rows are; blocks: of 128 rows."""
    if scale.ndim == 2:  # of a matrix, or of each half
        return scale.shape[1], int(scale.shape[1] == 2), 0
    columns = scale.shape[2] if blocks else 1
    return scale.shape[1] * columns, scale.shape[1] // halves * columns, columns


def bytes_decoder(weight: Tensor, scale: Tensor, scheme: str, gated: bool, space: Tensor) -> Decoder:
    """As `dequantize.decoder`, of weight uint8 or int8 [E, row tiles, K tiles, 8192] and the layout's scales."""
    _, n, width = space.shape
    row_tiles = weight.shape[1]
    form = stored_format(scheme, weight, scale, None)
    expert, half, row = (0, 0, 0) if form.scaled else _steps(scale, form.scale == "tile", 2 if gated else 1)
    launch = Repeated(
        dequantize_bytes_kernel,
        (weight.view(torch.int32), scale, space),
        FORMAT=form,
        N=n,
        WIDTH=width,
        TILES_K=weight.shape[2],
        GATED=gated,
        ROW_TILES=row_tiles,
        EXPERT=expert,
        HALF=half,
        ROW=row,
        USE_PTX=target_of(space.device)["USE_PTX"],
    )

    def run(first: int, count: int, column: int) -> None:
        launch((count * row_tiles, ceil_div(width, 128)), first, column // 128)

    return Decoder(form.unit if form.scaled else 1.0, run)
