"""The multiply loop that both GEMMs share: acc[n, t] = sum_k weight[n, k] * operand[t, k].

Weights are the tensor core's first operand: decoded 4-bit tiles go there straight from registers, and a
few tokens make a narrow tile rather than one that is mostly padding.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_moe_ops.kernels.triton.decode import decode_nvfp4

_PREFETCH = tl.constexpr("cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;")


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
def _dot(a, b, acc, USE_PTX: tl.constexpr):
    # Triton's interpreter has no bfloat16 arithmetic.
    return tl.dot(a, b, acc) if USE_PTX else tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")


@triton.jit
def _multiply_nvfp4(
    acc, operand_ptr, operand_rows, w_ptr, scale_ptr, columns, part, OPERAND_STRIDE: tl.constexpr, K:
    tl.constexpr, K_PART: tl.constexpr, MASKED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = operand_ptr.dtype.element_ty
    words: tl.constexpr = BLOCK_K // 8
    groups: tl.constexpr = BLOCK_K // 16
    k = tl.arange(0, BLOCK_K)
    word = tl.arange(0, words)
    group = tl.arange(0, groups)
    operand = operand_ptr + operand_rows[:, None] * OPERAND_STRIDE + (part * K_PART + k)[None, :]
    w = w_ptr + columns[:, None] * (K // 8) + (part * (K_PART // 8) + word)[None, :]
    scale = scale_ptr + columns[:, None] * (K // 16) + (part * (K_PART // 16) + group)[None, :]
    for begin in tl.range(0, K_PART, BLOCK_K, num_stages=STAGES):
        if not MASKED:
            packed = tl.load(w)
            scales = tl.load(scale)
            x = tl.load(operand)
        else:
            # Zero scales make zeros of whatever lies beyond K; the operand is padded with zeros up to
            # a multiple of 64 and masked from there on.
            packed = tl.load(w, mask=(part * (K_PART // 8) + begin // 8 + word)[None, :] < K // 8, other=0)
            scales = tl.load(scale, mask=(part * (K_PART // 16) + begin // 16 + group)[None, :] < K // 16, other=0)
            x = tl.load(operand, mask=(part * K_PART + begin + k)[None, :] < OPERAND_STRIDE, other=0.0)
        a = decode_nvfp4(packed, scales, dtype, BLOCK_N, words, USE_PTX)
        acc = _dot(a, x.trans(), acc, USE_PTX)
        operand += BLOCK_K
        w += words
        scale += groups
    return acc


@triton.jit
def _multiply_plain(
    acc, operand_ptr, operand_rows, w_ptr, columns, part, OPERAND_STRIDE: tl.constexpr, K: tl.constexpr, K_PART:
    tl.constexpr, MASKED: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    k = tl.arange(0, BLOCK_K)
    operand = operand_ptr + operand_rows[:, None] * OPERAND_STRIDE + (part * K_PART + k)[None, :]
    w = w_ptr + columns[:, None] * K + (part * K_PART + k)[None, :]
    for begin in tl.range(0, K_PART, BLOCK_K, num_stages=STAGES):
        if not MASKED:
            a = tl.load(w)
            x = tl.load(operand)
        else:
            a = tl.load(w, mask=(part * K_PART + begin + k)[None, :] < K, other=0.0)
            x = tl.load(operand, mask=(part * K_PART + begin + k)[None, :] < K, other=0.0)
        acc = _dot(a, x.trans(), acc, USE_PTX)
        operand += BLOCK_K
        w += BLOCK_K
    return acc


@triton.jit
def multiply(
    operand_ptr, operand_rows, w_ptr, scale_ptr, expert, columns, part, SCHEME: tl.constexpr, N: tl.constexpr, K:
    tl.constexpr, K_PART: tl.constexpr, MASKED: tl.constexpr, OPERAND_STRIDE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_N, BLOCK_T]: weight rows `columns` of `expert` times operand rows `operand_rows` (int64).

    w: int32 words [E, N, K / 8] with scale uint8 [E, N, K / 16] (SCHEME "nvfp4"), or values [E, N, K].
    Sums over the part-th K_PART values of K: all of K, or a part that is a multiple of BLOCK_K. MASKED: any
    step goes beyond K.
    """
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    if SCHEME == "nvfp4":
        acc = _multiply_nvfp4(
            acc, operand_ptr, operand_rows, w_ptr + expert * (N * (K // 8)), scale_ptr + expert * (N * (K // 16)),
            columns, part, OPERAND_STRIDE, K, K_PART, MASKED, BLOCK_N, BLOCK_K, STAGES, USE_PTX,
        )  # fmt: skip
    else:
        tl.static_assert(SCHEME == "none", "unknown scheme")
        acc = _multiply_plain(
            acc, operand_ptr, operand_rows, w_ptr + expert * N * K, columns, part, OPERAND_STRIDE, K, K_PART, MASKED,
            BLOCK_K, STAGES, USE_PTX,
        )  # fmt: skip
    return acc
