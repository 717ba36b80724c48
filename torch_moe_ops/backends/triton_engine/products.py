"""One step along K: reading the operand, and the tensor core's product."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_operand(operand, live, k, END: tl.constexpr, MASKED: tl.constexpr):
    """A step of the operand, [BLOCK_T, BLOCK_K]: zeros where `k` is beyond END, if MASKED says that it can be.

    So are rows that are not live, in tiles of few tokens: most rows are not there, and to read another one in their
    place would take as many bytes from the L2 as the weights do.
    """
    few: tl.constexpr = operand.shape[0] <= 32
    if MASKED and few:
        x = tl.load(operand, mask=live[:, None] & (k < END)[None, :], other=0.0)
    elif MASKED:
        x = tl.load(operand, mask=(k < END)[None, :], other=0.0)
    elif few:
        x = tl.load(operand, mask=live[:, None], other=0.0)
    else:
        x = tl.load(operand)
    return x


@triton.jit
def dot(a, x, acc, USE_PTX: tl.constexpr):
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
def settle(acc, USE_PTX: tl.constexpr):
    """acc, used: a step of K then ends when its products have.

    Triton leaves products of operands in registers in flight at the end of a step, and the next step writes the same
    registers: a race up to at least Triton 3.6 with ptxas 12.9 (triton-lang/triton#9433).
    """
    if USE_PTX:
        acc = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [acc], dtype=acc.dtype, is_pure=True, pack=1)
    return acc
