"""The multiply loop that both GEMMs share: acc[n, t] = sum_k weight[n, k] * operand[t, k].

Weights are the tensor core's first operand: decoded tiles go there straight from registers, and a
few tokens make a narrow tile rather than one that is mostly padding.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_moe_ops.kernels.triton.decode_scales import load_groups, load_groups_before
from torch_moe_ops.kernels.triton.decode_words import decode_two_terms, decode_words

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
def tile_of(table_ptr, num_tiles_max, num_experts, expert_offset, COLUMN_TILES: tl.constexpr, DIRECT: tl.constexpr):
    """This program's (valid, expert, column tile, first row, rows of the expert, row tile).

    The tiles of one expert are worked on together, its row tiles next to each other: its weights come
    from memory once. DIRECT: table_ptr holds the expert ids, and every slot is a tile and a row of its own.
    """
    program = tl.program_id(0)
    tile = program // COLUMN_TILES
    if DIRECT:
        expert = tl.load(table_ptr + tile) - expert_offset
        valid = (expert >= 0) & (expert < num_experts)
        column_tile = program % COLUMN_TILES
        start = tile
        rows = tile * 0 + 1
        row_tile = tile * 0
    else:
        expert = tl.load(table_ptr + tile)
        first = tl.load(table_ptr + num_tiles_max + tile)
        count = tl.load(table_ptr + 2 * num_tiles_max + tile)
        start = tl.load(table_ptr + 3 * num_tiles_max + tile)
        rows = tl.load(table_ptr + 4 * num_tiles_max + tile)
        count = tl.maximum(count, 1)  # 0 in tiles beyond the last one
        local = program - first * COLUMN_TILES
        valid = expert >= 0
        column_tile = local // count
        row_tile = local % count
    return valid, expert.to(tl.int64), column_tile, start, rows, row_tile


@triton.jit
def _dot(a, x, acc, USE_PTX: tl.constexpr):
    """acc + a @ x.T, int32 of int8; float32 operands, which hold at most 11 significant bits, as tf32."""
    # Triton's interpreter has no bfloat16 arithmetic.
    if not USE_PTX:
        return tl.dot(a.to(tl.float32), x.to(tl.float32).trans(), acc, input_precision="ieee")
    elif tl.int8 == a.dtype:
        return tl.dot(a, x.trans(), acc, out_dtype=tl.int32)
    elif tl.float32 == a.dtype:
        return tl.dot(a, x.to(tl.float32).trans(), acc, input_precision="tf32")
    else:
        return tl.dot(a, x.trans(), acc)


@triton.jit
def _settle(acc, USE_PTX: tl.constexpr):
    """acc, used: a step of K then ends when its products have.

    Triton leaves products of operands in registers in flight at the end of a step, and the next step writes the same
    registers: a race up to at least Triton 3.6 with ptxas 12.9 (triton-lang/triton#9433).
    """
    if USE_PTX:
        acc = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [acc], dtype=acc.dtype, is_pure=True, pack=1)
    return acc


@triton.jit
def _add_scaled(acc, sums, scale):
    """scale: [BLOCK_N, 1], of the group that a step of K belongs to."""
    return acc + sums * scale.to(tl.float32)


@triton.jit
def _step(
    acc, packed, x, scale, zero, FORMAT: tl.constexpr, DTYPE: tl.constexpr, BLOCK_N: tl.constexpr, WORDS: tl.constexpr,
    USE_PTX: tl.constexpr,
):  # fmt: skip
    """acc plus the products of one step along K."""
    if FORMAT.terms == 2:
        high, low = decode_two_terms(packed, scale, zero, FORMAT, DTYPE, BLOCK_N, WORDS, USE_PTX)
        acc = _dot(high, x, acc, USE_PTX)
        acc = _dot(low, x, acc, USE_PTX)
    else:
        a = decode_words(packed, scale, zero, FORMAT, DTYPE, BLOCK_N, WORDS, USE_PTX)
        if FORMAT.scale == "partial":
            acc = _add_scaled(acc, _dot(a, x, tl.zeros_like(acc), USE_PTX), scale)
        else:
            acc = _dot(a, x, acc, USE_PTX)
    return acc


@triton.jit
def _rest(
    operand, w, scale_rows, zero_rows, row_zero, part, FORMAT: tl.constexpr, OPERAND_STRIDE: tl.constexpr,
    K: tl.constexpr, K_PART: tl.constexpr, FULL: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """(words, operand, scales, zero points) of the K values from FULL on: [., REST] with zeros beyond K.

    operand, w: pointers to rows. All zero in every part but that which FULL is in.
    """
    per: tl.constexpr = FORMAT.per_word
    word = FULL // per + tl.arange(0, REST // per)
    k = FULL + tl.arange(0, REST)
    end = tl.where(tl.zeros((1,), tl.int32) + part == FULL // K_PART, K, 0)
    packed = tl.load(w + word[None, :], mask=(per * word < end)[None, :], other=0)
    # The operand is padded with zeros up to a multiple of 64 and masked from there on.
    x = tl.load(operand + k[None, :], mask=((k < OPERAND_STRIDE) & (end > FULL))[None, :], other=0.0)
    scale = load_groups(scale_rows, FULL, FORMAT.group, K, REST, True) if FORMAT.group else row_zero
    zero = load_groups(zero_rows, FULL, FORMAT.group, K, REST, True) if FORMAT.zero == "group" else row_zero
    return packed, x, scale, zero


@triton.jit
def _multiply_words(
    acc, operand_ptr, operand_rows, w_ptr, scale_ptr, zero_ptr, columns, part, FORMAT: tl.constexpr,
    OPERAND_STRIDE: tl.constexpr, K: tl.constexpr, K_PART: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, AHEAD: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """Words of codes, K in the order of `permute`.

    Steps of BLOCK_K need no masks; what they leave of K is read before them and multiplied after them.
    AHEAD: read scales a step ahead into registers, where the pipeline through shared memory cannot take them.
    """
    dtype: tl.constexpr = tl.float32 if FORMAT.wide else operand_ptr.dtype.element_ty
    per: tl.constexpr = FORMAT.per_word
    words: tl.constexpr = BLOCK_K // per
    full: tl.constexpr = K // BLOCK_K * BLOCK_K
    rest: tl.constexpr = 64 if K - full <= 64 else 128 if K - full <= 128 else BLOCK_K
    operand_row = operand_ptr + operand_rows[:, None] * OPERAND_STRIDE
    w_row = w_ptr + columns[:, None] * (K // per)
    scale_rows = scale_ptr + columns[:, None] * (K // FORMAT.group if FORMAT.group else 0)
    zero_rows = zero_ptr + columns[:, None] * (K // FORMAT.group if FORMAT.group else 0)
    row_zero = tl.load(zero_ptr + columns)[:, None] if FORMAT.zero == "row" else tl.full((BLOCK_N, 1), 8, tl.uint8)
    if full < K:
        last_packed, last_x, last_scale, last_zero = _rest(
            operand_row, w_row, scale_rows, zero_rows, row_zero, part, FORMAT, OPERAND_STRIDE, K,
            K_PART, full, rest,
        )  # fmt: skip
    first = part * K_PART
    operand = operand_row + (first + tl.arange(0, BLOCK_K))[None, :]
    w = w_row + (first // per + tl.arange(0, words))[None, :]
    if AHEAD:
        next_scale = load_groups_before(scale_rows, first, full, FORMAT.group, BLOCK_K)
    for begin in tl.range(0, full if K_PART == K else tl.minimum(K_PART, full - first), BLOCK_K, num_stages=STAGES):
        packed = tl.load(w)
        x = tl.load(operand)
        at = first + begin
        if AHEAD:
            scale = next_scale
            next_scale = load_groups_before(scale_rows, at + BLOCK_K, full, FORMAT.group, BLOCK_K)
        else:
            scale = load_groups(scale_rows, at, FORMAT.group, K, BLOCK_K, False) if FORMAT.group else row_zero
        zero = load_groups(zero_rows, at, FORMAT.group, K, BLOCK_K, False) if FORMAT.zero == "group" else row_zero
        acc = _settle(_step(acc, packed, x, scale, zero, FORMAT, dtype, BLOCK_N, words, USE_PTX), USE_PTX)
        operand += BLOCK_K
        w += words
    if full < K:
        acc = _step(
            acc, last_packed, last_x, last_scale, last_zero, FORMAT, dtype, BLOCK_N, rest // per, USE_PTX
        )  # fmt: skip
    return acc


@triton.jit
def _multiply_tiles(
    acc, operand_ptr, operand_rows, operand_scale_ptr, w_ptr, scale_ptr, columns, part, FORMAT: tl.constexpr,
    HALF: tl.constexpr, HAS_OPERAND_SCALE: tl.constexpr, OPERAND_STRIDE: tl.constexpr, K: tl.constexpr,
    K_PART: tl.constexpr, MASKED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    USE_PTX: tl.constexpr,
):  # fmt: skip
    """A float32 scale for each tile of 128 x 128 of the weights, and for each 128 of an operand row.

    Words of codes, or e4m3 codes as they are. BLOCK_K is a part of 128: both scales multiply a sum of exact products.
    """
    dtype: tl.constexpr = operand_ptr.dtype.element_ty
    per: tl.constexpr = FORMAT.per_word
    words: tl.constexpr = BLOCK_K // per
    tiles_k: tl.constexpr = (K + 127) // 128
    k = tl.arange(0, BLOCK_K)
    word = tl.arange(0, words)
    operand = operand_ptr + operand_rows[:, None] * OPERAND_STRIDE + (part * K_PART + k)[None, :]
    w = w_ptr + columns[:, None] * (K // per) + (part * (K_PART // per) + word)[None, :]
    row_tile = (columns // HALF) * ((HALF + 127) // 128) + (columns % HALF) // TILE
    scale_rows = scale_ptr + row_tile * tiles_k
    operand_scale_rows = operand_scale_ptr + operand_rows * tiles_k
    # A step ahead: they are too small to be copied to shared memory while the steps before are multiplied.
    tile = tl.minimum(part * K_PART // TILE, tiles_k - 1)  # beyond K all products are zero: any scale will do
    scale = tl.load(scale_rows + tile)
    operand_scale = tl.load(operand_scale_rows + tile) if HAS_OPERAND_SCALE else None
    for begin in tl.range(0, K_PART, BLOCK_K, num_stages=STAGES):
        at = part * K_PART + begin
        if not MASKED:
            packed = tl.load(w)
            x = tl.load(operand)
        else:
            packed = tl.load(w, mask=(at // per + word)[None, :] < K // per, other=0 if per > 1 else 0.0)
            x = tl.load(operand, mask=(at + k)[None, :] < OPERAND_STRIDE, other=0.0)
        factor = scale[:, None] * operand_scale[None, :] if HAS_OPERAND_SCALE else scale[:, None]
        tile = tl.minimum((at + BLOCK_K) // TILE, tiles_k - 1)
        scale = tl.load(scale_rows + tile)
        operand_scale = tl.load(operand_scale_rows + tile) if HAS_OPERAND_SCALE else None
        a = packed
        if per > 1:
            a = decode_words(packed, None, None, FORMAT, dtype, BLOCK_N, words, USE_PTX)
        acc += _dot(a, x, tl.zeros_like(acc), USE_PTX) * factor
        operand += BLOCK_K
        w += words
    return acc


@triton.jit
def _multiply_plain(
    acc, operand_ptr, operand_rows, w_ptr, columns, part, PROMOTE: tl.constexpr, OPERAND_STRIDE: tl.constexpr,
    K: tl.constexpr, K_PART: tl.constexpr, MASKED: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    SWAPPED: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """Values that are multiplied as they are: 16-bit floats, int8 or e4m3 codes.

    PROMOTE: the tensor core sums a step of K alone, and float32 arithmetic the steps.
    SWAPPED: acc is [BLOCK_T, BLOCK_N], and the operand the first factor.
    """
    k = tl.arange(0, BLOCK_K)
    operand = operand_ptr + operand_rows[:, None] * OPERAND_STRIDE + (part * K_PART + k)[None, :]
    w = w_ptr + columns[:, None] * K + (part * K_PART + k)[None, :]
    for begin in tl.range(0, K_PART, BLOCK_K, num_stages=STAGES):
        if not MASKED:
            a = tl.load(w)
            x = tl.load(operand)
        else:
            a = tl.load(w, mask=(part * K_PART + begin + k)[None, :] < K, other=0.0 if PROMOTE else 0)
            x = tl.load(operand, mask=(part * K_PART + begin + k)[None, :] < K, other=0.0 if PROMOTE else 0)
        if SWAPPED:
            a, x = x, a
        acc = acc + _dot(a, x, tl.zeros_like(acc), USE_PTX) if PROMOTE else _dot(a, x, acc, USE_PTX)
        operand += BLOCK_K
        w += BLOCK_K
    return acc


@triton.jit
def multiply(
    operand_ptr, operand_rows, operand_scale_ptr, w_ptr, scale_ptr, zero_ptr, expert, columns, part,
    FORMAT: tl.constexpr, FACTOR: tl.constexpr, N: tl.constexpr, HALF: tl.constexpr, K: tl.constexpr,
    K_PART: tl.constexpr, MASKED: tl.constexpr, OPERAND_STRIDE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_N, BLOCK_T]: weight rows `columns` of `expert` times operand rows `operand_rows` (int64).

    w: int32 words [E, N, K / FORMAT.per_word], or values; scale, zero points [E, N, K / FORMAT.group], or a scale
    [E, tiles of rows, tiles of K], each HALF of the rows tiled by itself. What FORMAT says is along K is applied, but
    for FORMAT.unit; so are the operand's scales where FACTOR is "group".
    Sums over the part-th K_PART values of K: all of K, or a part that is a multiple of BLOCK_K. MASKED: any
    step goes beyond K. AHEAD: see _multiply_words.
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
        tiles: tl.constexpr = (N // HALF) * ((HALF + 127) // 128) * ((K + 127) // 128)
        acc = _multiply_tiles(
            acc, operand_ptr, operand_rows, operand_scale_ptr, w, scale_ptr + expert * tiles, columns, part, FORMAT,
            HALF, FACTOR == "group", OPERAND_STRIDE, K, K_PART, MASKED, BLOCK_N, BLOCK_K, STAGES, USE_PTX,
        )  # fmt: skip
    elif FORMAT.per_word == 1:
        acc = _multiply_plain(
            acc, operand_ptr, operand_rows, w, columns, part, FORMAT.native and not integer, OPERAND_STRIDE, K, K_PART,
            MASKED, BLOCK_K, STAGES, swapped, USE_PTX,
        )  # fmt: skip
        acc = acc.trans() if swapped else acc
    else:
        groups: tl.constexpr = K // FORMAT.group if FORMAT.group else 1
        acc = _multiply_words(
            acc, operand_ptr, operand_rows, w, scale_ptr + expert * (N * groups), zero_ptr + expert * (N * groups),
            columns, part, FORMAT, OPERAND_STRIDE, K, K_PART, BLOCK_N, BLOCK_K, STAGES, AHEAD, USE_PTX,
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
