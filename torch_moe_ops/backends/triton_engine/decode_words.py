"""Words of eight 4-bit or four 8-bit codes -> the operand that the tensor cores multiply, in registers.

By PTX (decode_nibbles.py, decode_bytes.py), or by arithmetic that every target and Triton's interpreter have.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_moe_ops.backends.triton_engine.decode_bytes import four_bytes, four_bytes_and
from torch_moe_ops.backends.triton_engine.decode_nibbles import (
    int4_of_8,
    minus_biased,
    nibbles,
    two_terms,
    two_terms_of_8,
)
from torch_moe_ops.backends.triton_engine.decode_scales import float_scale, spread
from torch_moe_ops.backends.triton_engine.elements import decode_e2m1, decode_minifloat, narrow


@triton.jit
def _value(word, zero, scale, INDEX: tl.constexpr, FORMAT: tl.constexpr):
    """float32 value of one code of each word, zero point taken away, times a scale that is part of the weight."""
    code: tl.constexpr = FORMAT.code
    if code == "e2m1":
        value = decode_e2m1((word >> (4 * INDEX)) & 15)
    elif code == "int4":
        value = ((word >> (4 * INDEX)) & 15).to(tl.float32) - zero
    elif code == "int8":
        value = ((word << (24 - 8 * INDEX)) >> 24).to(tl.float32)
        if FORMAT.zero != "":
            value -= zero
    else:
        value = decode_minifloat((word >> (8 * INDEX)) & 255, code)
    return value * scale if FORMAT.scaled else value


@triton.jit
def _eight_ordered(c0, c1, c2, c3, c4, c5, c6, c7, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Code i of each word -> [ROWS, 8 * WORDS], K in the order of `permute`."""
    low = tl.join(tl.join(c0, c4), tl.join(c1, c5))  # [.., p, j] of q = 0
    high = tl.join(tl.join(c2, c6), tl.join(c3, c7))
    codes = tl.join(low, high)  # [ROWS, WORDS, p, j, q]
    codes = codes.reshape(ROWS, WORDS // 8, 4, 2, 2, 2, 2).permute(0, 1, 3, 6, 5, 2, 4)
    return codes.reshape(ROWS, 8 * WORDS)


@triton.jit
def _four_ordered(c0, c1, c2, c3, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Code i of each word -> [ROWS, 4 * WORDS], K in the order of `permute`."""
    codes = tl.join(tl.join(c0, c2), tl.join(c1, c3))  # [ROWS, WORDS, p, q]
    codes = codes.reshape(ROWS, WORDS // 8, 4, 2, 2, 2).permute(0, 1, 3, 5, 2, 4)
    return codes.reshape(ROWS, 4 * WORDS)


@triton.jit
def _eight_natural(c0, c1, c2, c3, c4, c5, c6, c7, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Code i of each word -> [ROWS, 8 * WORDS], K in its own order."""
    even = tl.join(tl.join(c0, c4), tl.join(c2, c6))
    odd = tl.join(tl.join(c1, c5), tl.join(c3, c7))
    return tl.join(even, odd).reshape(ROWS, 8 * WORDS)


@triton.jit
def four_natural(c0, c1, c2, c3, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Code i of each word -> [ROWS, 4 * WORDS], K in its own order."""
    return tl.join(tl.join(c0, c2), tl.join(c1, c3)).reshape(ROWS, 4 * WORDS)


@triton.jit
def _decode_nibbles(
    word, scale, zero, FORMAT: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
    USE_PTX: tl.constexpr, NATURAL: tl.constexpr,
):  # fmt: skip
    code: tl.constexpr = FORMAT.code
    if USE_PTX and tl.float32 != DTYPE:
        if code == "e2m1":
            other = spread(float_scale(scale, FORMAT, DTYPE), ROWS, WORDS)
            c0, c1, c2, c3, c4, c5, c6, c7 = nibbles(word, other, code, DTYPE)
        elif FORMAT.zero != "":
            other = spread(minus_biased(zero, DTYPE), ROWS, WORDS)
            c0, c1, c2, c3, c4, c5, c6, c7 = nibbles(word, other, code, DTYPE)
        else:
            c0, c1, c2, c3, c4, c5, c6, c7 = int4_of_8(word, DTYPE)
    else:
        z = spread(zero.to(tl.float32), ROWS, WORDS) if code == "int4" else None
        s = spread(float_scale(scale, FORMAT, tl.float32), ROWS, WORDS) if FORMAT.scaled else None
        c0 = narrow(_value(word, z, s, 0, FORMAT), DTYPE, USE_PTX)
        c1 = narrow(_value(word, z, s, 1, FORMAT), DTYPE, USE_PTX)
        c2 = narrow(_value(word, z, s, 2, FORMAT), DTYPE, USE_PTX)
        c3 = narrow(_value(word, z, s, 3, FORMAT), DTYPE, USE_PTX)
        c4 = narrow(_value(word, z, s, 4, FORMAT), DTYPE, USE_PTX)
        c5 = narrow(_value(word, z, s, 5, FORMAT), DTYPE, USE_PTX)
        c6 = narrow(_value(word, z, s, 6, FORMAT), DTYPE, USE_PTX)
        c7 = narrow(_value(word, z, s, 7, FORMAT), DTYPE, USE_PTX)
    if NATURAL:
        return _eight_natural(c0, c1, c2, c3, c4, c5, c6, c7, ROWS, WORDS)
    else:
        return _eight_ordered(c0, c1, c2, c3, c4, c5, c6, c7, ROWS, WORDS)


@triton.jit
def _decode_bytes(
    word, scale, zero, FORMAT: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
    USE_PTX: tl.constexpr, NATURAL: tl.constexpr,
):  # fmt: skip
    code: tl.constexpr = FORMAT.code
    if USE_PTX and tl.float32 != DTYPE:
        if FORMAT.scaled:
            c0, c1, c2, c3 = four_bytes_and(word, spread(float_scale(scale, FORMAT, DTYPE), ROWS, WORDS), code, DTYPE)
        elif FORMAT.zero != "":
            minus = (0.0 - zero.to(tl.float32)).to(DTYPE)
            c0, c1, c2, c3 = four_bytes_and(word, spread(minus, ROWS, WORDS), code, DTYPE)
        else:
            c0, c1, c2, c3 = four_bytes(word, code, DTYPE)
    else:
        z = spread(zero.to(tl.float32), ROWS, WORDS) if FORMAT.zero != "" else None
        s = spread(float_scale(scale, FORMAT, tl.float32), ROWS, WORDS) if FORMAT.scaled else None
        c0 = narrow(_value(word, z, s, 0, FORMAT), DTYPE, USE_PTX)
        c1 = narrow(_value(word, z, s, 1, FORMAT), DTYPE, USE_PTX)
        c2 = narrow(_value(word, z, s, 2, FORMAT), DTYPE, USE_PTX)
        c3 = narrow(_value(word, z, s, 3, FORMAT), DTYPE, USE_PTX)
    if NATURAL:
        return four_natural(c0, c1, c2, c3, ROWS, WORDS)
    else:
        return _four_ordered(c0, c1, c2, c3, ROWS, WORDS)


@triton.jit
def decode_words(
    word, scale, zero, FORMAT: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
    USE_PTX: tl.constexpr, NATURAL: tl.constexpr = False,
):  # fmt: skip
    """word: int32 [ROWS, WORDS]; scale: as stored, [ROWS, groups], or None where it is no part of the weight; zero:
    uint8 or int8 [ROWS, groups], of int4 always.

    DTYPE: bfloat16, float16, or float32 for scales that float16 has no range for.
    Returns DTYPE [ROWS, FORMAT.per_word * WORDS] / FORMAT.unit, K in the order of `permute`; NATURAL: in its own.
    """
    if FORMAT.per_word == 8:
        return _decode_nibbles(word, scale, zero, FORMAT, DTYPE, ROWS, WORDS, USE_PTX, NATURAL)
    else:
        return _decode_bytes(word, scale, zero, FORMAT, DTYPE, ROWS, WORDS, USE_PTX, NATURAL)


@triton.jit
def _two(value, DTYPE: tl.constexpr, USE_PTX: tl.constexpr):
    high = narrow(value, DTYPE, USE_PTX)
    return high, narrow(value - high.to(tl.float32), DTYPE, USE_PTX)


@triton.jit
def decode_two_terms(
    word, scale, zero, FORMAT: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
    USE_PTX: tl.constexpr,
):  # fmt: skip
    """As decode_words, for int4 and int8 with group scales: matrices that sum to fl((code - zero) * scale) to 2^-17."""
    if FORMAT.per_word == 8 and USE_PTX and scale.dtype == DTYPE:
        wide = spread(scale, ROWS, WORDS)
        if FORMAT.zero != "":
            minus = spread(minus_biased(zero, DTYPE), ROWS, WORDS)
            h0, h1, h2, h3, h4, h5, h6, h7, l0, l1, l2, l3, l4, l5, l6, l7 = two_terms(word, wide, minus, DTYPE)
        else:
            h0, h1, h2, h3, h4, h5, h6, h7, l0, l1, l2, l3, l4, l5, l6, l7 = two_terms_of_8(word, wide, DTYPE)
    else:
        z = spread(zero.to(tl.float32), ROWS, WORDS) if FORMAT.zero != "" or FORMAT.code == "int4" else None
        s = spread(float_scale(scale, FORMAT, tl.float32), ROWS, WORDS)
        h0, l0 = _two(_value(word, z, s, 0, FORMAT), DTYPE, USE_PTX)
        h1, l1 = _two(_value(word, z, s, 1, FORMAT), DTYPE, USE_PTX)
        h2, l2 = _two(_value(word, z, s, 2, FORMAT), DTYPE, USE_PTX)
        h3, l3 = _two(_value(word, z, s, 3, FORMAT), DTYPE, USE_PTX)
        if FORMAT.per_word == 8:
            h4, l4 = _two(_value(word, z, s, 4, FORMAT), DTYPE, USE_PTX)
            h5, l5 = _two(_value(word, z, s, 5, FORMAT), DTYPE, USE_PTX)
            h6, l6 = _two(_value(word, z, s, 6, FORMAT), DTYPE, USE_PTX)
            h7, l7 = _two(_value(word, z, s, 7, FORMAT), DTYPE, USE_PTX)
    if FORMAT.per_word == 8:
        high = _eight_ordered(h0, h1, h2, h3, h4, h5, h6, h7, ROWS, WORDS)
        return high, _eight_ordered(l0, l1, l2, l3, l4, l5, l6, l7, ROWS, WORDS)
    else:
        return _four_ordered(h0, h1, h2, h3, ROWS, WORDS), _four_ordered(l0, l1, l2, l3, ROWS, WORDS)
