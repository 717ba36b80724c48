"""Scales along K: reading them a step of K at a time, and the factors that decoded weights are multiplied by."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_moe_ops.backends.triton_engine.elements import decode_e4m3


@triton.jit
def load_groups(rows, k, GROUP: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr):
    """What the BLOCK_K values from k on share in groups of GROUP: [BLOCK_N, groups]; zeros beyond K.

    rows: pointers [BLOCK_N, 1] to the first of K / GROUP values in a row.
    """
    groups: tl.constexpr = BLOCK_K // GROUP if GROUP < BLOCK_K else 1
    index = k // GROUP + tl.arange(0, groups)
    if MASKED:
        values = tl.load(rows + index[None, :], mask=(index < K // GROUP)[None, :], other=0)
    else:
        values = tl.load(rows + index[None, :])
    return values


@triton.jit
def load_groups_before(rows, k, end, GROUP: tl.constexpr, BLOCK_K: tl.constexpr):
    """As load_groups, of all BLOCK_K values or, where k is not below `end`, zeros: one condition for a whole step."""
    groups: tl.constexpr = BLOCK_K // GROUP if GROUP < BLOCK_K else 1
    index = k // GROUP + tl.arange(0, groups)
    return tl.load(rows + index[None, :], mask=(tl.zeros_like(index) + k < end)[None, :], other=0)


@triton.jit
def load_groups_as_words(words_ptr, row, k, GROUP: tl.constexpr, BLOCK_K: tl.constexpr):
    """As load_groups, of single bytes, for steps that lie inside K and hold a multiple of 4 groups: by 32-bit words.

    words_ptr: int32, where row 0 begins. row: [BLOCK_N], bytes from there to each row, any number of them.
    """
    count: tl.constexpr = BLOCK_K // GROUP // 4
    at = (row >> 2)[:, None] + (k // GROUP // 4 + tl.arange(0, count))[None, :]
    odd = (row & 3).to(tl.uint32)
    low = tl.load(words_ptr + at).to(tl.uint32, bitcast=True)
    # A row that begins with a word needs no second one; there may be none.
    high = tl.load(words_ptr + at + (odd != 0).to(tl.int32)[:, None]).to(tl.uint32, bitcast=True)
    shift = (odd * 8)[:, None]
    word = (low >> shift) | ((high << (31 - shift)) << 1)
    # Shifts by numbers from outside of the loop would keep the compiler from decoding to where the tensor core reads.
    b0 = (word & 255).to(tl.uint8)
    b1 = ((word >> 8) & 255).to(tl.uint8)
    b2 = ((word >> 16) & 255).to(tl.uint8)
    b3 = (word >> 24).to(tl.uint8)
    return tl.join(tl.join(b0, b2), tl.join(b1, b3)).reshape(row.shape[0], 4 * count)


@triton.jit
def spread(values, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, groups] -> [ROWS, COLUMNS], each value repeated."""
    groups: tl.constexpr = values.shape[1]
    return tl.broadcast_to(values[:, :, None], (ROWS, groups, COLUMNS // groups)).reshape(ROWS, COLUMNS)


@triton.jit
def _e4m3_bf16(byte):
    """2^118 * e4m3 as bfloat16, from uint8 (non-negative codes)."""
    tiny = (byte.to(tl.uint16) << 4).to(tl.bfloat16, bitcast=True)  # 2^-120 of the value
    # 2^238 in two steps, each inside bfloat16's range.
    return (tiny * 6.646139978924579e35) * 6.646139978924579e35


@triton.jit
def _e4m3_f16(byte):
    """2^6 * e4m3 as float16, from uint8 (non-negative codes)."""
    return (byte.to(tl.uint16) << 7).to(tl.float16, bitcast=True) * 16384.0


@triton.jit
def _e8m0_bf16(byte, CODE: tl.constexpr):
    """2^(byte - 127 - 48) over what a code of CODE placed in bfloat16's bits is short of; infinity beyond its range.

    A code in place is 2^(its bias - 127) of its value: one product makes up for that too.
    """
    lacks: tl.constexpr = 120 if CODE == "e4m3" else 124 if CODE == "e3m2" else 126
    exponent = tl.minimum(byte.to(tl.int16) + (lacks - 48), 255)
    return (exponent << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def float_scale(scale, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """The factor of codes as DTYPE, over FORMAT.unit.

    For PTX decoding to 16 bits with what placed codes lack included; in float32 without.
    """
    if FORMAT.scale == "e4m3":
        if tl.float32 == DTYPE:
            factor = decode_e4m3(scale.to(tl.int32)) * (1.0 / 256.0)
        elif tl.bfloat16 == DTYPE:
            factor = _e4m3_bf16(scale)
        else:
            factor = _e4m3_f16(scale)
    elif FORMAT.scale == "e8m0":
        if tl.float32 == DTYPE:
            # Byte 0, 2^-127, becomes 0: with it every weight of the block is below 2^-118.
            factor = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True) * 3.552713678800501e-15
        else:
            code: tl.constexpr = FORMAT.code
            factor = _e8m0_bf16(scale, code)
    else:
        factor = scale.to(DTYPE)
    return factor
