"""4-bit codes, eight to a word -> bfloat16 or float16 by placing bits, in PTX.

No 8-bit float type is involved, so the same code serves SM80. e2m1 times its block scale needs six significant bits:
the product is exact, up to a constant power of two. int4 codes are exact; times a scale they need two terms.
"""

from __future__ import annotations

import triton
import triton.language as tl


def _e2m1_bf16(nibble: int) -> str:
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


def _e2m1_f16(nibble: int) -> str:
    """The same in float16, whose magnitude bits 9 to 11 are too near to the sign for one product."""
    left = 12 - 4 * nibble
    sign = f"shl.b32 b, $8, {left};" if left else "mov.b32 b, $8;"
    shift = 9 - 4 * nibble
    move = f"shl.b32 a, $8, {shift};" if shift >= 0 else f"shr.b32 a, $8, {-shift};"
    return (
        f"{sign} {move} and.b32 a, a, 0x0E000E00; lop3.b32 a, b, 0x80008000, a, 0xEA;"
        f" mul.rn.f16x2 a, a, s; mov.b32 {{${nibble}, ${nibble + 4}}}, a;\n"
    )


def _int4_pair(nibble: int, is_bf16: bool, terms: int) -> str:
    """PTX: code - zero point of two nibbles; with two terms, its product with s, and what that product lacks.

    A nibble in the lowest mantissa bits of 2^7 (bfloat16) or 2^10 (float16) is that power plus the code;
    n is -(2^p + zero point), which takes both away at once. A constant is no input: a value from outside of the
    loop would keep the compiler from decoding to where the tensor core reads.
    """
    kind = "bf16x2" if is_bf16 else "f16x2"
    word = f"shr.u32 a, w, {4 * nibble};" if nibble else "mov.b32 a, w;"
    place = f"{word} lop3.b32 a, a, 0x000F000F, {'0x43004300' if is_bf16 else '0x64006400'}, 0xEA;"
    place += f" fma.rn.{kind} a, a, o, n;"
    if terms == 1:
        return f"{place} mov.b32 {{${nibble}, ${nibble + 4}}}, a;\n"
    # The product has at most 13 significant bits: what is left of it after rounding is exact.
    return (
        f"{place} fma.rn.{kind} b, a, s, z; xor.b32 c, b, 0x80008000; fma.rn.{kind} a, a, s, c;"
        f" mov.b32 {{${nibble}, ${nibble + 4}}}, b; mov.b32 {{${nibble + 8}, ${nibble + 12}}}, a;\n"
    )


def _eight_e2m1(is_bf16: bool) -> str:
    """$0 to $7: codes in the word $8, times $9; z is -0: x * s - 0 is the same number as x * s."""
    # bfloat16 has a multiply of its own only from SM90 on.
    head = "{\n.reg .b32 a, b, s, u, z;\nmov.b32 s, {$9, $9}; mov.b32 z, 0x80008000; shr.u32 u, $8, 8;\n"
    return head + "".join((_e2m1_bf16 if is_bf16 else _e2m1_f16)(i) for i in range(4)) + "}\n"


def _eight_int4(is_bf16: bool, terms: int, zero: bool) -> str:
    """$0 to $7: codes of the word, less the zero point; with two terms $0 to $15, times the scale.

    Inputs: word, then the scale of two terms, then minus the biased zero point, else that of 8.
    """
    word = 8 * terms
    biased = f"{{${word + terms}, ${word + terms}}}" if zero else "0xC308C308" if is_bf16 else "0xE408E408"
    head = f"{{\n.reg .b32 a, b, c, n, o, s, w, z;\nmov.b32 w, ${word}; mov.b32 n, {biased};\n"
    head += f"mov.b32 o, {'0x3F803F80' if is_bf16 else '0x3C003C00'}; mov.b32 z, 0x80008000;\n"
    if terms == 2:
        head += f"mov.b32 s, {{${word + 1}, ${word + 1}}};\n"
    return head + "".join(_int4_pair(i, is_bf16, terms) for i in range(4)) + "}\n"


_E2M1_BF16 = tl.constexpr(_eight_e2m1(True))
_E2M1_F16 = tl.constexpr(_eight_e2m1(False))
_INT4_BF16 = tl.constexpr(_eight_int4(True, 1, False))
_INT4_F16 = tl.constexpr(_eight_int4(False, 1, False))
_INT4_BF16_ZERO = tl.constexpr(_eight_int4(True, 1, True))
_INT4_F16_ZERO = tl.constexpr(_eight_int4(False, 1, True))
_INT4_BF16_TWO = tl.constexpr(_eight_int4(True, 2, False))
_INT4_F16_TWO = tl.constexpr(_eight_int4(False, 2, False))
_INT4_BF16_TWO_ZERO = tl.constexpr(_eight_int4(True, 2, True))
_INT4_F16_TWO_ZERO = tl.constexpr(_eight_int4(False, 2, True))
_EIGHT = tl.constexpr(",".join(["=h"] * 8) + ",r")
_EIGHT_AND = tl.constexpr(",".join(["=h"] * 8) + ",r,h")
_SIXTEEN = tl.constexpr(",".join(["=h"] * 16) + ",r,h")
_SIXTEEN_AND = tl.constexpr(",".join(["=h"] * 16) + ",r,h,h")


@triton.jit
def minus_biased(zero, DTYPE: tl.constexpr):
    """-(2^p + zero point) in DTYPE (p = 7 or 10), from uint8: the code's place in `_int4_pair`."""
    bits = zero.to(tl.uint16) | (0xC300 if tl.bfloat16 == DTYPE else 0xE400)
    return bits.to(DTYPE, bitcast=True)


@triton.jit
def int4_of_8(word, DTYPE: tl.constexpr):
    """Eight int4 codes of each word, less 8."""
    if tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(_INT4_BF16, _EIGHT, [word], (tl.bfloat16,) * 8, is_pure=True, pack=1)
    else:
        return tl.inline_asm_elementwise(_INT4_F16, _EIGHT, [word], (tl.float16,) * 8, is_pure=True, pack=1)


@triton.jit
def nibbles(word, other, CODE: tl.constexpr, DTYPE: tl.constexpr):
    """Eight codes of each word. other: 16 bits, the factor of e2m1, minus the biased zero point of int4."""
    if tl.bfloat16 == DTYPE:
        bf16: tl.constexpr = _E2M1_BF16 if CODE == "e2m1" else _INT4_BF16_ZERO
        return tl.inline_asm_elementwise(bf16, _EIGHT_AND, [word, other], (tl.bfloat16,) * 8, is_pure=True, pack=1)
    else:
        f16: tl.constexpr = _E2M1_F16 if CODE == "e2m1" else _INT4_F16_ZERO
        return tl.inline_asm_elementwise(f16, _EIGHT_AND, [word, other], (tl.float16,) * 8, is_pure=True, pack=1)


@triton.jit
def two_terms_of_8(word, scale, DTYPE: tl.constexpr):
    """Eight high parts, then eight low ones, of int4 codes less 8, times a scale of DTYPE."""
    if tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(
            _INT4_BF16_TWO, _SIXTEEN, [word, scale], (tl.bfloat16,) * 16, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            _INT4_F16_TWO, _SIXTEEN, [word, scale], (tl.float16,) * 16, is_pure=True, pack=1
        )


@triton.jit
def two_terms(word, scale, minus, DTYPE: tl.constexpr):
    """The same with a zero point of its own: minus, biased."""
    if tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(
            _INT4_BF16_TWO_ZERO, _SIXTEEN_AND, [word, scale, minus], (tl.bfloat16,) * 16, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            _INT4_F16_TWO_ZERO, _SIXTEEN_AND, [word, scale, minus], (tl.float16,) * 16, is_pure=True, pack=1
        )
