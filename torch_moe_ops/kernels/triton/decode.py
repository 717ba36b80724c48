"""Packed weight tiles -> the operand that the tensor cores multiply, in registers.

Weights and block scales are decoded to bfloat16 or float16 by placing bits, without any 8-bit float
type, so the same code serves SM80. A 4-bit weight times its block scale needs six significant bits:
the product is exact, up to a constant power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_moe_ops.kernels.triton.quantize import decode_e2m1, decode_e4m3


def _pair_bf16(nibble: int) -> str:
    """PTX: codes `nibble` and `nibble + 4` of the word $8, times s, to $nibble and $nibble + 4, as bfloat16.

    The sign goes to bit 15, the magnitude to bits 6 to 8. One product does both shifts: the two copies
    of a nibble, 6 bits apart, do not overlap, and no carry leaves their half of the word.
    """
    word = "$8" if nibble < 2 else "u"
    mask, factor = ("0x000F000F", 4160) if nibble % 2 == 0 else ("0x00F000F0", 260)
    return (
        f"and.b32 a, {word}, {mask}; mul.lo.u32 a, a, {factor}; and.b32 a, a, 0x81C081C0;"
        f" fma.rn.bf16x2 a, a, s, z; mov.b32 {{${nibble}, ${nibble + 4}}}, a;\n"
    )


def _pair_f16(nibble: int) -> str:
    """The same in float16, whose magnitude bits 9 to 11 are too near to the sign for one product."""
    left = 12 - 4 * nibble
    sign = f"shl.b32 b, $8, {left};" if left else "mov.b32 b, $8;"
    shift = 9 - 4 * nibble
    move = f"shl.b32 a, $8, {shift};" if shift >= 0 else f"shr.b32 a, $8, {-shift};"
    return (
        f"{sign} {move} and.b32 a, a, 0x0E000E00; lop3.b32 a, b, 0x80008000, a, 0xEA;"
        f" mul.rn.f16x2 a, a, s; mov.b32 {{${nibble}, ${nibble + 4}}}, a;\n"
    )


def _eight_codes(is_bf16: bool) -> str:
    # bfloat16 has a multiply of its own only from SM90 on: x * s - 0 is the same number.
    head = "{\n.reg .b32 a, b, s, u, z;\nmov.b32 s, {$9, $9}; mov.b32 z, 0x80008000; shr.u32 u, $8, 8;\n"
    return head + "".join((_pair_bf16 if is_bf16 else _pair_f16)(nibble) for nibble in range(4)) + "}\n"


_DECODE_BF16 = tl.constexpr(_eight_codes(True))
_DECODE_F16 = tl.constexpr(_eight_codes(False))
_REGISTERS = tl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r,h")

# float32 factor that an accumulator of decoded 4-bit weights lacks.
NVFP4_ACCUMULATOR_SCALE = tl.constexpr(256.0)


@triton.jit
def _scale_e4m3_bf16(byte):
    """2^118 * e4m3 as bfloat16, from uint8 (non-negative codes)."""
    tiny = (byte.to(tl.uint16) << 4).to(tl.bfloat16, bitcast=True)  # 2^-120 of the value
    # 2^238 in two steps, each inside bfloat16's range.
    return (tiny * 6.646139978924579e35) * 6.646139978924579e35


@triton.jit
def _scale_e4m3_f16(byte):
    """2^6 * e4m3 as float16, from uint8 (non-negative codes)."""
    return (byte.to(tl.uint16) << 7).to(tl.float16, bitcast=True) * 16384.0


@triton.jit
def _code(word, scale, NIBBLE: tl.constexpr, DTYPE: tl.constexpr):
    """One code of each word, decoded and scaled by arithmetic that every target has; scale: float32."""
    return (decode_e2m1((word >> (4 * NIBBLE)) & 15) * scale).to(DTYPE)


@triton.jit
def decode_e2m1_words(word, scale, DTYPE: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, USE_PTX: tl.constexpr):
    """word: int32 [ROWS, WORDS], eight codes each; scale: [ROWS, WORDS], DTYPE for PTX, else float32.

    Returns DTYPE [ROWS, 8 * WORDS], K in the order of `permute`.
    """
    if USE_PTX:
        if tl.bfloat16 == DTYPE:
            c0, c1, c2, c3, c4, c5, c6, c7 = tl.inline_asm_elementwise(
                _DECODE_BF16, _REGISTERS, [word, scale], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1
            )
        else:
            c0, c1, c2, c3, c4, c5, c6, c7 = tl.inline_asm_elementwise(
                _DECODE_F16, _REGISTERS, [word, scale], dtype=(tl.float16,) * 8, is_pure=True, pack=1
            )
    else:
        c0 = _code(word, scale, 0, DTYPE)
        c1 = _code(word, scale, 1, DTYPE)
        c2 = _code(word, scale, 2, DTYPE)
        c3 = _code(word, scale, 3, DTYPE)
        c4 = _code(word, scale, 4, DTYPE)
        c5 = _code(word, scale, 5, DTYPE)
        c6 = _code(word, scale, 6, DTYPE)
        c7 = _code(word, scale, 7, DTYPE)
    low = tl.join(tl.join(c0, c4), tl.join(c1, c5))  # [.., p, j] of q = 0
    high = tl.join(tl.join(c2, c6), tl.join(c3, c7))
    codes = tl.join(low, high)  # [ROWS, WORDS, p, j, q]
    blocks: tl.constexpr = WORDS // 8
    codes = codes.reshape(ROWS, blocks, 4, 2, 2, 2, 2).permute(0, 1, 3, 6, 5, 2, 4)
    return codes.reshape(ROWS, 8 * WORDS)


@triton.jit
def decode_nvfp4(
    word, scale, DTYPE: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, USE_PTX: tl.constexpr
):  # fmt: skip
    """word: int32 [ROWS, WORDS]; scale: uint8 [ROWS, WORDS / 2], e4m3. Returns DTYPE [ROWS, 8 * WORDS] / 256."""
    if not USE_PTX:
        factor = decode_e4m3(scale.to(tl.int32)) * (1.0 / 256.0)
    elif tl.bfloat16 == DTYPE:
        factor = _scale_e4m3_bf16(scale)
    else:
        factor = _scale_e4m3_f16(scale)
    factor = tl.broadcast_to(factor[:, :, None], (ROWS, WORDS // 2, 2)).reshape(ROWS, WORDS)
    return decode_e2m1_words(word, factor, DTYPE, ROWS, WORDS, USE_PTX)
