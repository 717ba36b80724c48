"""8-bit codes, four to a word -> bfloat16 or float16 by placing bits, in PTX.

fp8 and fp6 codes take one product, which block scales of MX formats share: exact. int8 codes are exact in both.
A NaN code of e4m3 in a weight is read as 480; quantizers of weights write none.
"""

from __future__ import annotations

import triton
import triton.language as tl

_ELEMENTS = {"e4m3": (8, 3), "e3m2": (6, 2), "e2m3": (6, 3)}  # bits in all, of the mantissa


def _float_pair(first: int, element: str, is_bf16: bool) -> str:
    """PTX: bytes `first` and `first + 2` of the word $4, times s.

    With the byte on top of its halfword, the sign goes to bit 15 and the magnitude to the place of an exponent.
    """
    width, mantissa = _ELEMENTS[element]
    shift = 8 - (7 if is_bf16 else 10) + mantissa
    mask = ((1 << (width - 1)) - 1) << (8 - shift)
    top = "shl.b32 a, $4, 8;" if first == 0 else "mov.b32 a, $4;"
    sign = f"shl.b32 b, a, {8 - width};" if width < 8 else "mov.b32 b, a;"
    product = "fma.rn.bf16x2 a, a, s, z;" if is_bf16 else "mul.rn.f16x2 a, a, s;"
    return (
        f"{top} {sign} shr.u32 a, a, {shift}; and.b32 a, a, 0x{mask:04X}{mask:04X};"
        f" lop3.b32 a, b, 0x80008000, a, 0xEA; {product} mov.b32 {{${first}, ${first + 2}}}, a;\n"
    )


def _four_floats(element: str, is_bf16: bool, factor: str) -> str:
    """$0 to $3: codes in the word $4 times the factor, $5 or a constant; z is -0."""
    head = f"{{\n.reg .b32 a, b, s, z;\nmov.b32 z, 0x80008000; mov.b32 s, {factor};\n"
    return head + _float_pair(0, element, is_bf16) + _float_pair(1, element, is_bf16) + "}\n"


def _int8_pair(first: int, is_bf16: bool, zero: bool) -> str:
    """PTX: bytes `first` and `first + 2` of the word $4, less the zero point -n.

    bfloat16: the lower seven bits in the mantissa of 2^7 make 2^7 plus them; what has to go, 2^7 or with a sign 2^8,
    is the sign bit in the place that it has, below the same exponent. float16: all eight, the sign flipped, in the
    mantissa of 2^10.
    """
    take = "mov.b32 a, $4;" if first == 0 else "shr.u32 a, $4, 8;"
    if is_bf16:
        text = (
            f"{take} lop3.b32 b, a, 0x00800080, 0x43004300, 0xEA; lop3.b32 a, a, 0x007F007F, 0x43004300, 0xEA;"
            " fma.rn.bf16x2 a, b, m, a;"
        )
        text += " fma.rn.bf16x2 a, a, o, n;" if zero else ""
    else:
        text = f"{take} lop3.b32 a, a, 0x00FF00FF, 0x64806480, 0x6A; add.rn.f16x2 a, a, m;"
        text += " add.rn.f16x2 a, a, n;" if zero else ""
    return f"{text} mov.b32 {{${first}, ${first + 2}}}, a;\n"


def _four_int8(is_bf16: bool, zero: bool) -> str:
    """$0 to $3: codes in the word $4; $5: minus the zero point."""
    minus, one = ("0xBF80BF80", "0x3F803F80") if is_bf16 else ("0xE480E480", "0x3C003C00")
    head = f"{{\n.reg .b32 a, b, m, n, o;\nmov.b32 m, {minus}; mov.b32 o, {one};\n"
    head += "mov.b32 n, {$5, $5};\n" if zero else ""
    return head + _int8_pair(0, is_bf16, zero) + _int8_pair(1, is_bf16, zero) + "}\n"


_E4M3_BF16 = tl.constexpr(_four_floats("e4m3", True, "0x7B807B80"))  # 2^120
_E4M3_F16 = tl.constexpr(_four_floats("e4m3", False, "0x5C005C00"))  # 2^8
_E4M3_SCALED = tl.constexpr(_four_floats("e4m3", True, "{$5, $5}"))
_E3M2_SCALED = tl.constexpr(_four_floats("e3m2", True, "{$5, $5}"))
_E2M3_SCALED = tl.constexpr(_four_floats("e2m3", True, "{$5, $5}"))
_INT8_BF16 = tl.constexpr(_four_int8(True, False))
_INT8_F16 = tl.constexpr(_four_int8(False, False))
_INT8_BF16_ZERO = tl.constexpr(_four_int8(True, True))
_INT8_F16_ZERO = tl.constexpr(_four_int8(False, True))
_FOUR = tl.constexpr("=h,=h,=h,=h,r")
_FOUR_AND = tl.constexpr("=h,=h,=h,=h,r,h")


@triton.jit
def four_bytes(word, CODE: tl.constexpr, DTYPE: tl.constexpr):
    """Codes of each word, e4m3 or int8, exactly."""
    if tl.bfloat16 == DTYPE:
        bf16: tl.constexpr = _INT8_BF16 if CODE == "int8" else _E4M3_BF16
        return tl.inline_asm_elementwise(bf16, _FOUR, [word], (tl.bfloat16,) * 4, is_pure=True, pack=1)
    else:
        f16: tl.constexpr = _INT8_F16 if CODE == "int8" else _E4M3_F16
        return tl.inline_asm_elementwise(f16, _FOUR, [word], (tl.float16,) * 4, is_pure=True, pack=1)


@triton.jit
def four_bytes_and(word, other, CODE: tl.constexpr, DTYPE: tl.constexpr):
    """Codes of each word: fp8 or fp6 times `other`, as bfloat16, or int8 plus `other`."""
    if CODE == "int8":
        if tl.bfloat16 == DTYPE:
            return tl.inline_asm_elementwise(
                _INT8_BF16_ZERO, _FOUR_AND, [word, other], (tl.bfloat16,) * 4, is_pure=True, pack=1
            )
        else:
            return tl.inline_asm_elementwise(
                _INT8_F16_ZERO, _FOUR_AND, [word, other], (tl.float16,) * 4, is_pure=True, pack=1
            )
    else:
        text: tl.constexpr = _E4M3_SCALED if CODE == "e4m3" else _E3M2_SCALED if CODE == "e3m2" else _E2M3_SCALED
        return tl.inline_asm_elementwise(text, _FOUR_AND, [word, other], (tl.bfloat16,) * 4, is_pure=True, pack=1)
