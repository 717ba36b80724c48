"""The multiply loop that both GEMMs share: acc[n, t] = sum_k weight[n, k] * operand[t, k].

Weights are the tensor core's first operand: decoded tiles go there straight from registers, and a
few tokens make a narrow tile rather than one that is mostly padding.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_moe_ops.backends.triton_engine.decode_words import decode_words
from torch_moe_ops.backends.triton_engine.dependent import load_settled
from torch_moe_ops.backends.triton_engine.products import dot, load_operand
from torch_moe_ops.backends.triton_engine.tiled import TILE_BYTES, tile_pointers
from torch_moe_ops.backends.triton_engine.words import multiply_words

_PREFETCH = tl.constexpr("cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;")
TILE = tl.constexpr(128)  # rows and columns of a tile of scales


@triton.jit
def prefetch_rows(w_ptr, expert, columns, N: tl.constexpr, ROW_BYTES: tl.constexpr):
    """Ask the L2 for weight rows, without waiting (SM90 and later; ROW_BYTES a multiple of 16).

    What a program can do for itself while the kernel before it still runs.
    """
    row = w_ptr.to(tl.pointer_type(tl.uint8)) + expert * (N * ROW_BYTES) + columns * ROW_BYTES
    size = tl.full(columns.shape, ROW_BYTES, tl.int32)
    tl.inline_asm_elementwise(
        _PREFETCH, "=r,l,r", [row.to(tl.int64), size], dtype=tl.int32, is_pure=False, pack=1
    )  # fmt: skip


@triton.jit
def tile_of(
    table_ptr, num_slots, num_tiles_max, num_experts, expert_offset, COLUMN_TILES: tl.constexpr,
    DIRECT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """This program's (valid, expert, column tile, first row, rows of the expert, row tile).

    The tiles of one expert are worked on together, its row tiles next to each other: its weights come
    from memory once. DIRECT: table_ptr holds the expert ids, and every slot is a tile and a row of its own.
    EARLY: called before waiting for the kernel in front.

    Valid means that all are in range, whatever the table holds: where ids changed while a schedule was made, its
    programs disagree, and entries are missing or of two experts.
    """
    program = tl.program_id(0)
    tile = program // COLUMN_TILES
    if DIRECT:
        expert = load_settled(table_ptr + tile, EARLY) - expert_offset
        valid = (expert >= 0) & (expert < num_experts)
        column_tile = program % COLUMN_TILES
        start = tile
        rows = tile * 0 + 1
        row_tile = tile * 0
    else:
        expert = load_settled(table_ptr + tile, EARLY)
        first = load_settled(table_ptr + num_tiles_max + tile, EARLY)
        count = load_settled(table_ptr + 2 * num_tiles_max + tile, EARLY)
        start = load_settled(table_ptr + 3 * num_tiles_max + tile, EARLY)
        rows = load_settled(table_ptr + 4 * num_tiles_max + tile, EARLY)
        valid = (expert >= 0) & (expert < num_experts)
        valid = valid & (first >= 0) & (first <= tile) & (tile < first + count)
        valid = valid & (start >= 0) & (rows > 0) & (rows <= num_slots) & (start <= num_slots - rows)
        count = tl.maximum(count, 1)  # 0 in tiles beyond the last one
        local = program - first * COLUMN_TILES
        column_tile = local // count
        row_tile = local % count
    return valid, expert.to(tl.int64), column_tile, start, rows, row_tile


@triton.jit
def slot_of_row(row_slot_ptr, rows, num_slots):
    """The slots of rows that are in range; they are too, whatever is there (see tile_of)."""
    return tl.minimum(tl.maximum(tl.load(row_slot_ptr + rows), 0), num_slots - 1)


@triton.jit
def _weights(
    w_ptr, columns, part, FORMAT: tl.constexpr, N: tl.constexpr, HALF: tl.constexpr, K: tl.constexpr,
    K_PART: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Pointers [columns, BLOCK_K / FORMAT.per_word] to the first step of an expert's weights."""
    if FORMAT.tiled:
        return tile_pointers(w_ptr, columns, part * (K_PART // BLOCK_K), HALF, HALF < N, K)
    else:
        per: tl.constexpr = FORMAT.per_word
        word = part * (K_PART // per) + tl.arange(0, BLOCK_K // per)
        return w_ptr + columns[:, None] * (K // per) + word[None, :]


@triton.jit
def _multiply_tiles(
    acc, operand_ptr, operand_rows, live, operand_scale_ptr, w, scale_rows, part, FORMAT: tl.constexpr,
    HAS_OPERAND_SCALE: tl.constexpr, OPERAND_STRIDE: tl.constexpr, K: tl.constexpr,
    K_PART: tl.constexpr, MASKED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    USE_PTX: tl.constexpr,
):  # fmt: skip
    """A float32 scale for each tile of 128 x 128 of the weights, and for each 128 of an operand row.

    Words of codes, or e4m3 codes as they are. BLOCK_K is a part of 128: both scales multiply a sum of exact products.
    """
    dtype: tl.constexpr = operand_ptr.dtype.element_ty
    per: tl.constexpr = FORMAT.per_word
    words: tl.constexpr = BLOCK_K // per
    step: tl.constexpr = TILE_BYTES if FORMAT.tiled else words
    tiles_k: tl.constexpr = (K + 127) // 128
    k = tl.arange(0, BLOCK_K)
    word = tl.arange(0, words)
    operand = operand_ptr + operand_rows[:, None] * OPERAND_STRIDE + (part * K_PART + k)[None, :]
    operand_scale_rows = operand_scale_ptr + operand_rows * tiles_k
    # A step ahead: they are too small to be copied to shared memory while the steps before are multiplied.
    tile = tl.minimum(part * K_PART // TILE, tiles_k - 1)  # beyond K all products are zero: any scale will do
    scale = tl.load(scale_rows + tile)
    operand_scale = tl.load(operand_scale_rows + tile) if HAS_OPERAND_SCALE else scale
    for begin in tl.range(0, K_PART, BLOCK_K, num_stages=STAGES):
        at = part * K_PART + begin
        if not MASKED:
            packed = tl.load(w)
        else:
            packed = tl.load(w, mask=(at // per + word)[None, :] < K // per, other=0 if per > 1 else 0.0)
        x = load_operand(operand, live, at + k, OPERAND_STRIDE, MASKED)
        factor = scale[:, None] * operand_scale[None, :] if HAS_OPERAND_SCALE else scale[:, None]
        tile = tl.minimum((at + BLOCK_K) // TILE, tiles_k - 1)
        scale = tl.load(scale_rows + tile)
        operand_scale = tl.load(operand_scale_rows + tile) if HAS_OPERAND_SCALE else scale
        a = packed
        if per > 1:
            a = decode_words(packed, None, None, FORMAT, dtype, BLOCK_N, words, USE_PTX)
        acc += dot(a, x, tl.zeros_like(acc), USE_PTX) * factor
        operand += BLOCK_K
        w += step
    return acc


@triton.jit
def _multiply_plain(
    acc, operand_ptr, operand_rows, live, w, part, PROMOTE: tl.constexpr, OPERAND_STRIDE: tl.constexpr,
    K: tl.constexpr, K_PART: tl.constexpr, MASKED: tl.constexpr, BLOCK_K: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr, SWAPPED: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """Values that are multiplied as they are: 16-bit floats, int8 or e4m3 codes.

    PROMOTE: the tensor core sums a step of K alone, and float32 arithmetic the steps.
    STEP: from the weights of one step to those of the next.
    SWAPPED: acc is [BLOCK_T, BLOCK_N], and the operand the first factor.
    """
    k = tl.arange(0, BLOCK_K)
    operand = operand_ptr + operand_rows[:, None] * OPERAND_STRIDE + (part * K_PART + k)[None, :]
    for begin in tl.range(0, K_PART, BLOCK_K, num_stages=STAGES):
        at = part * K_PART + begin + k
        a = tl.load(w, mask=(at < K)[None, :], other=0.0) if MASKED else tl.load(w)
        x = load_operand(operand, live, at, K, MASKED)
        if SWAPPED:
            a, x = x, a
        acc = acc + dot(a, x, tl.zeros_like(acc), USE_PTX) if PROMOTE else dot(a, x, acc, USE_PTX)
        operand += BLOCK_K
        w += STEP
    return acc


@triton.jit
def multiply(
    operand_ptr, operand_rows, live, operand_scale_ptr, w_ptr, scale_ptr, zero_ptr, expert, columns, part,
    FORMAT: tl.constexpr, FACTOR: tl.constexpr, N: tl.constexpr, HALF: tl.constexpr, K: tl.constexpr,
    K_PART: tl.constexpr, MASKED: tl.constexpr, OPERAND_STRIDE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, SCALES: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_N, BLOCK_T]: weight rows `columns` of `expert` times operand rows `operand_rows` (int64).

    Of rows that are not live anything may come out.

    w: int32 words [E, N, K / FORMAT.per_word], values, or tiles of them (FORMAT.tiled, BLOCK_K is 128); scale, zero
    points [E, N, K / FORMAT.group], or a scale [E, tiles of rows, tiles of K], each HALF of the rows tiled by itself.
    What FORMAT says is along K is applied, but for FORMAT.unit; so are the operand's scales where FACTOR is "group".
    Sums over the part-th K_PART values of K: all of K, or a part that is a multiple of BLOCK_K. MASKED: any
    step goes beyond K. SCALES: see words.multiply_words.
    """
    if N * K >= 2**31:
        columns = columns.to(tl.int64)
    integer: tl.constexpr = FORMAT.native and FORMAT.code == "int8"
    # The second factor is read from shared memory once for each 64 rows of the first, so it should be the longer one;
    # decoded weights have to be the first.
    swapped: tl.constexpr = FORMAT.per_word == 1 and FORMAT.scale != "tile" and BLOCK_T >= 64 and BLOCK_N >= BLOCK_T
    shape: tl.constexpr = (BLOCK_T, BLOCK_N) if swapped else (BLOCK_N, BLOCK_T)
    acc = tl.zeros(shape, tl.int32 if integer else tl.float32)
    w = w_ptr + expert * (N * (K // FORMAT.per_word))
    if FORMAT.scale == "tile":
        tiles_k: tl.constexpr = (K + 127) // 128
        tiles: tl.constexpr = (N // HALF) * ((HALF + 127) // 128) * tiles_k
        row_tile = (columns // HALF) * ((HALF + 127) // 128) + (columns % HALF) // TILE
        scale_rows = scale_ptr + expert * tiles + row_tile * tiles_k
        first = _weights(w, columns, part, FORMAT, N, HALF, K, K_PART, BLOCK_K)
        acc = _multiply_tiles(
            acc, operand_ptr, operand_rows, live, operand_scale_ptr, first, scale_rows, part, FORMAT,
            FACTOR == "group", OPERAND_STRIDE, K, K_PART, MASKED, BLOCK_N, BLOCK_K, STAGES, USE_PTX,
        )  # fmt: skip
    elif FORMAT.per_word == 1:
        acc = _multiply_plain(
            acc, operand_ptr, operand_rows, live, _weights(w, columns, part, FORMAT, N, HALF, K, K_PART, BLOCK_K), part,
            FORMAT.native and not integer, OPERAND_STRIDE, K, K_PART, MASKED, BLOCK_K,
            TILE_BYTES if FORMAT.tiled else BLOCK_K, STAGES, swapped, USE_PTX,
        )  # fmt: skip
        acc = acc.trans() if swapped else acc
    else:
        groups: tl.constexpr = K // FORMAT.group if FORMAT.group else 1
        acc = multiply_words(
            acc, operand_ptr, operand_rows, live, w, scale_ptr + expert * (N * groups),
            zero_ptr + expert * (N * groups), columns, part, FORMAT, OPERAND_STRIDE, K, K_PART, BLOCK_N, BLOCK_K,
            STAGES, SCALES, USE_PTX,
        )  # fmt: skip
    return acc.to(tl.float32)


@triton.jit
def rescale(
    acc, alpha_ptr, factor_ptr, operand_rows, expert, columns, FORMAT: tl.constexpr, FACTOR: tl.constexpr,
    ALPHAS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """fl(acc * fl(alpha * row factor)), times FORMAT.unit: a power of two, exact.

    ALPHAS: alphas per expert, each for N / ALPHAS rows of the weight; 0: none.
    """
    unit: tl.constexpr = FORMAT.unit
    if ALPHAS == 1:
        alpha = tl.load(alpha_ptr + expert).to(tl.float32)
    elif ALPHAS > 1:
        alpha = tl.load(alpha_ptr + expert * ALPHAS + columns // (N // ALPHAS)).to(tl.float32)[:, None]
    else:
        alpha = 1.0
    if FACTOR == "row":
        acc = acc * ((alpha * tl.load(factor_ptr + operand_rows)[None, :]) * unit)
    elif FACTOR == "tensor" or FACTOR == "expert":
        gscale = tl.load(factor_ptr + expert if FACTOR == "expert" else factor_ptr)
        acc = acc * ((alpha * tl.div_rn(1.0, gscale)) * unit)
    elif ALPHAS or unit != 1.0:
        acc = acc * (alpha * unit)
    return acc
