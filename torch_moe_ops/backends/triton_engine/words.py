"""Multiplying weights that are words of codes, decoded in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_moe_ops.backends.triton_engine.decode_scales import load_groups, load_groups_as_words, load_groups_before
from torch_moe_ops.backends.triton_engine.decode_words import decode_two_terms, decode_words
from torch_moe_ops.backends.triton_engine.products import dot, load_operand, settle


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
        acc = dot(high, x, acc, USE_PTX)
        acc = dot(low, x, acc, USE_PTX)
    else:
        a = decode_words(packed, scale, zero, FORMAT, DTYPE, BLOCK_N, WORDS, USE_PTX)
        if FORMAT.scale == "partial":
            acc = _add_scaled(acc, dot(a, x, tl.zeros_like(acc), USE_PTX), scale)
        else:
            acc = dot(a, x, acc, USE_PTX)
    return acc


@triton.jit
def _rest(
    operand, live, w, scale_rows, zero_rows, row_zero, part, FORMAT: tl.constexpr, OPERAND_STRIDE: tl.constexpr,
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
    x = load_operand(operand + k[None, :], live, tl.where(end > FULL, k, OPERAND_STRIDE), OPERAND_STRIDE, True)
    scale = load_groups(scale_rows, FULL, FORMAT.group, K, REST, True) if FORMAT.group else row_zero
    zero = load_groups(zero_rows, FULL, FORMAT.group, K, REST, True) if FORMAT.zero == "group" else row_zero
    return packed, x, scale, zero


@triton.jit
def multiply_words(
    acc, operand_ptr, operand_rows, live, w_ptr, scale_ptr, zero_ptr, columns, part, FORMAT: tl.constexpr,
    OPERAND_STRIDE: tl.constexpr, K: tl.constexpr, K_PART: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, SCALES: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """Words of codes, K in the order of `permute`.

    Steps of BLOCK_K need no masks; what they leave of K is read before them and multiplied after them.
    SCALES: how they reach the loop: "copied" to shared memory with the words; so, but as words that are "shifted", as
    rows do not begin with one; or "ahead", a step, into registers.
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
            operand_row, live, w_row, scale_rows, zero_rows, row_zero, part, FORMAT, OPERAND_STRIDE, K,
            K_PART, full, rest,
        )  # fmt: skip
    first = part * K_PART
    operand = operand_row + (first + tl.arange(0, BLOCK_K))[None, :]
    w = w_row + (first // per + tl.arange(0, words))[None, :]
    if SCALES == "ahead":
        next_scale = load_groups_before(scale_rows, first, full, FORMAT.group, BLOCK_K)
    for begin in tl.range(0, full if K_PART == K else tl.minimum(K_PART, full - first), BLOCK_K, num_stages=STAGES):
        packed = tl.load(w)
        x = load_operand(operand, live, begin, K, False)
        at = first + begin
        if SCALES == "ahead":
            scale = next_scale
            next_scale = load_groups_before(scale_rows, at + BLOCK_K, full, FORMAT.group, BLOCK_K)
        elif SCALES == "shifted":
            row = columns * (K // FORMAT.group)
            words_ptr = scale_ptr.to(tl.pointer_type(tl.int32))
            scale = load_groups_as_words(words_ptr, row, at, FORMAT.group, BLOCK_K)
        else:
            scale = load_groups(scale_rows, at, FORMAT.group, K, BLOCK_K, False) if FORMAT.group else row_zero
        zero = load_groups(zero_rows, at, FORMAT.group, K, BLOCK_K, False) if FORMAT.zero == "group" else row_zero
        acc = settle(_step(acc, packed, x, scale, zero, FORMAT, dtype, BLOCK_N, words, USE_PTX), USE_PTX)
        operand += BLOCK_K
        w += words
    if full < K:
        acc = _step(
            acc, last_packed, last_x, last_scale, last_zero, FORMAT, dtype, BLOCK_N, rest // per, USE_PTX
        )  # fmt: skip
    return acc
