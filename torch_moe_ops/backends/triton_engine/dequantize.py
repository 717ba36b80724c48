"""Packed weights of the linear layout -> numbers in their own order, in one pass over memory.

What decodes is what the GEMMs decode with (decode_words.py). Codes with block scales of e4m3 and e8m0 are exact in
bfloat16; all other scales are applied in float32, and the product is rounded once.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_moe_ops.backends.triton_engine.backward_pass import Decoder
from torch_moe_ops.backends.triton_engine.decode_scales import load_groups, spread
from torch_moe_ops.backends.triton_engine.decode_words import decode_words
from torch_moe_ops.backends.triton_engine.elements import narrow
from torch_moe_ops.backends.triton_engine.formats import stored_format
from torch_moe_ops.backends.triton_engine.known import Repeated
from torch_moe_ops.backends.triton_engine.plan import target_of
from torch_moe_ops.core.schemes import ceil_div

_ROWS, _K = 32, 256  # that a program decodes


@triton.jit
def store_scaled(
    value, out_ptr, at, mask, expert, row, scale_ptr, SCALES: tl.constexpr, N: tl.constexpr, UNIT: tl.constexpr,
    USE_PTX: tl.constexpr,
):  # fmt: skip
    """Store [rows, columns] values times UNIT and their scale, rounded once.

    scale_ptr: float [E, SCALES], each for N / SCALES rows of its expert; SCALES is 0 where there are none. Values keep
    what they lack of UNIT then, and are stored as they are.
    """
    if SCALES:
        scale = tl.load(scale_ptr + expert * SCALES + tl.minimum(row, N - 1) // (N // SCALES)).to(tl.float32)
        value = value.to(tl.float32) * (scale * UNIT)[:, None]
    if value.dtype != out_ptr.dtype.element_ty:
        value = narrow(value, out_ptr.dtype.element_ty, USE_PTX)
    tl.store(out_ptr + at, value, mask=mask)


@triton.jit(do_not_specialize=["first_expert", "first_block"])
def dequantize_kernel(
    w_ptr,
    scale_ptr,
    zero_ptr,
    row_scale_ptr,
    out_ptr,
    first_expert,
    first_block,
    FORMAT: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_PTX: tl.constexpr,
):
    """out [count, N, WIDTH] = weights of experts from `first_expert` on, from `first_block` along K on.

    Grid: (count * cdiv(N, BLOCK_N), cdiv(WIDTH, BLOCK_K)).

    w: int32 words [E, N, K / FORMAT.per_word]; scale and zero points as `mainloop.multiply` has them, HALF rows of
    tiles by themselves; row_scale: see store_scaled. The scale along K is one that is part of the weight, "partial" or
    "tile".
    """
    row_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    per: tl.constexpr = FORMAT.per_word
    words: tl.constexpr = BLOCK_K // per
    unit: tl.constexpr = FORMAT.unit
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    place = (tl.program_id(0) // row_blocks).to(tl.int64)
    expert = first_expert + place
    row = (tl.program_id(0) % row_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = (first_block + tl.program_id(1)) * BLOCK_K
    rows = expert * N + tl.minimum(row, N - 1)
    word = begin // per + tl.arange(0, words)
    packed = tl.load(w_ptr + rows[:, None] * (K // per) + word[None, :], mask=(word < K // per)[None, :], other=0)
    zero = tl.full((BLOCK_N, 1), 8, tl.uint8)
    scale = zero  # nothing reads it where there is none
    if FORMAT.zero == "row":
        zero = tl.load(zero_ptr + rows)[:, None]
    if FORMAT.scale == "tile":
        tiles_k: tl.constexpr = (K + 127) // 128
        tiles: tl.constexpr = (N // HALF) * ((HALF + 127) // 128)
        local = tl.minimum(row, N - 1)
        row_tile = (local // HALF) * ((HALF + 127) // 128) + (local % HALF) // 128
        column = begin // 128 + tl.arange(0, BLOCK_K // 128)
        at_tile = (expert * tiles + row_tile)[:, None] * tiles_k + column[None, :]
        scale = tl.load(scale_ptr + at_tile, mask=(column < tiles_k)[None, :], other=0.0)
    elif FORMAT.group:
        groups: tl.constexpr = K // FORMAT.group
        scale = load_groups(scale_ptr + rows[:, None] * groups, begin, FORMAT.group, K, BLOCK_K, True)
        if FORMAT.zero == "group":
            zero = load_groups(zero_ptr + rows[:, None] * groups, begin, FORMAT.group, K, BLOCK_K, True)
    value = decode_words(packed, scale, zero, FORMAT, dtype, BLOCK_N, words, USE_PTX, True)
    if FORMAT.scale == "partial" or FORMAT.scale == "tile":
        value = value.to(tl.float32) * spread(scale.to(tl.float32), BLOCK_N, BLOCK_K)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    at = (place * N + row)[:, None] * WIDTH + k[None, :]
    mask = (row < N)[:, None] & (k < WIDTH)[None, :]
    store_scaled(value, out_ptr, at, mask, expert, row, row_scale_ptr, ROW_SCALES, N, unit, USE_PTX)


def serves(scheme: str, dtype: torch.dtype) -> bool:
    """Whether `dequantize` decodes weights of the scheme to dtype.

    Exponents of MX blocks are taken as the GEMMs take them, which leaves less range than float32 has.
    """
    return scheme != "none" and (dtype == torch.bfloat16 or (dtype == torch.float32 and not scheme.startswith("mx")))


def decoder(
    stored: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None], scheme: str, halves: int, space: Tensor
) -> Decoder:
    """Args:
    stored: weight, scale, zero points and scale_2 of all experts, as gradients/weights.py has them, contiguous. Without
        scale_2, values that are exact in bfloat16 up to a power of two lack that power, which is the factor (else 1).
        With it, it is part of them, and they are rounded once.
    space: [step, N, width], contiguous.
    """
    weight, scale, zero_point, rows = stored
    assert scale is not None  # the op's checks have seen to it
    _, n, width = space.shape
    form = stored_format(scheme, weight, scale, zero_point)
    if form.scale == "float":  # not in two terms: in float32
        form = replace(form, scale="partial", terms=1)
    if rows is None and not form.group:
        rows = scale.flatten(1)
    scales = 0 if rows is None else rows.numel() // weight.shape[0]
    words = weight.view(torch.int32)
    codes = scale.view(torch.uint8) if scale.dtype == torch.float8_e4m3fn else scale
    launch = Repeated(
        dequantize_kernel,
        (words, codes, codes if zero_point is None else zero_point, codes if rows is None else rows, space),
        FORMAT=form,
        N=n,
        K=words.shape[2] * form.per_word,
        WIDTH=width,
        HALF=n // halves,
        ROW_SCALES=scales,
        BLOCK_N=_ROWS,
        BLOCK_K=_K,
        USE_PTX=target_of(space.device)["USE_PTX"],
    )
    row_blocks, columns = ceil_div(n, _ROWS), ceil_div(width, _K)

    def run(first: int, count: int, column: int) -> None:
        launch((count * row_blocks, columns), first, column // _K)

    return Decoder(1.0 if scales else form.unit, run)
