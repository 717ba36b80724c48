"""First launch: the schedule, and the hidden states as GEMM1 wants to read them.

Programs below num_scheduled write the schedule, the others one piece of an activation row each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_moe_ops.backends.triton_engine.dependent import wait_for_previous_kernel
from torch_moe_ops.backends.triton_engine.elements import amax_of_bits, magnitude_bits, narrow
from torch_moe_ops.backends.triton_engine.packed import load_packed
from torch_moe_ops.backends.triton_engine.permute import reorder
from torch_moe_ops.backends.triton_engine.quantize import (
    given_factor,
    quantize_given,
    quantize_groups,
    quantize_mx_blocks,
    quantize_row,
)
from torch_moe_ops.backends.triton_engine.schedule import schedule_expert


@triton.jit
def _row_amax(x_row, weight, K: tl.constexpr, PIECE: tl.constexpr, WEIGHTED: tl.constexpr, USE_PTX: tl.constexpr):
    """max |x| over a whole row; NaN where an element is NaN or infinite."""
    offsets = tl.arange(0, PIECE)
    largest = tl.zeros((PIECE,), tl.int32)
    for begin in range(0, K, PIECE):
        x = tl.load(x_row + begin + offsets, mask=begin + offsets < K, other=0.0)
        if WEIGHTED:
            x = narrow(x.to(tl.float32) * weight, x_row.dtype.element_ty, USE_PTX)
        largest = tl.maximum(largest, magnitude_bits(x.to(tl.float32)))
    return amax_of_bits(tl.max(largest))


@triton.jit
def _store_row_piece(
    out_row, k, value, K_PADDED: tl.constexpr, PIECE: tl.constexpr, PER_WORD: tl.constexpr, USE_PTX: tl.constexpr
):  # fmt: skip
    """Store values of natural indices k = begin + arange(PIECE), begin a multiple of 64, in the GEMM's order."""
    value = reorder(value.reshape(PIECE, 1), PIECE, 1, PER_WORD).reshape(PIECE)
    tl.store(out_row + k, narrow(value, out_row.dtype.element_ty, USE_PTX), mask=k < K_PADDED)


@triton.jit
def _quantize_piece(
    value, x_row, weight, gscale, factor_ptr, row, piece, ACT: tl.constexpr, HOW: tl.constexpr, K: tl.constexpr,
    PIECE: tl.constexpr, WEIGHTED: tl.constexpr, INT8: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """A piece [PIECE] of row x_row as HOW says; writes factors of rows and groups. gscale: of "tensor" and "expert".

    INT8: the operand is int8 codes.
    """
    if HOW == "tensor" or HOW == "expert":
        value = quantize_given(value.reshape(PIECE, 1), gscale, ACT, PIECE, 1).reshape(PIECE)
        if INT8:  # noqa: SIM102 - the outer condition is the compiler's
            if piece == 0:
                amax = _row_amax(x_row, weight, K, PIECE, WEIGHTED, USE_PTX)
                tl.store(factor_ptr + row, given_factor(amax, gscale))
    elif HOW == "token":
        value, factor = quantize_row(value, _row_amax(x_row, weight, K, PIECE, WEIGHTED, USE_PTX), ACT, PIECE)
        if piece == 0:
            tl.store(factor_ptr + row, factor)
    elif HOW == "block":
        if ACT == "fp8":
            groups: tl.constexpr = PIECE // 128
            value, scale = quantize_groups(value.reshape(PIECE, 1), PIECE, 1)
            value = value.reshape(PIECE)
            group = piece * groups + tl.arange(0, groups)
            in_row: tl.constexpr = (K + 127) // 128
            tl.store(factor_ptr + row * in_row + group, scale.reshape(groups), mask=group < in_row)
        else:
            value = quantize_mx_blocks(value.reshape(PIECE, 1), ACT, PIECE, 1).reshape(PIECE)
    return value


@triton.jit
def _write_hidden(
    program, x_ptr, x_scale_ptr, ids_ptr, weights_ptr, gscale_ptr, operand_ptr, factor_ptr, top_k, num_experts,
    expert_offset, K: tl.constexpr, K_PADDED: tl.constexpr, PIECE: tl.constexpr, ACT: tl.constexpr,
    HOW: tl.constexpr, WEIGHTED: tl.constexpr, PER_WORD: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    pieces: tl.constexpr = (K_PADDED + PIECE - 1) // PIECE
    row = (program // pieces).to(tl.int64)
    piece = program % pieces
    k = piece * PIECE + tl.arange(0, PIECE)
    token = row // top_k if HOW == "expert" else row
    if HOW == "packed":
        value = load_packed(x_ptr, x_scale_ptr, token, k, K, ACT)
    else:
        weight = tl.load(weights_ptr + token) if WEIGHTED else 1.0
        x = tl.load(x_ptr + token * K + k, mask=k < K, other=0.0)
        if WEIGHTED:
            x = narrow(x.to(tl.float32) * weight, x_ptr.dtype.element_ty, USE_PTX)
        gscale = 1.0
        if HOW == "tensor":
            gscale = tl.load(gscale_ptr)
        elif HOW == "expert":
            local = tl.load(ids_ptr + row) - expert_offset
            mine = (local >= 0) & (local < num_experts)
            gscale = tl.load(gscale_ptr + local, mask=mine, other=1.0)
        value = _quantize_piece(
            x.to(tl.float32), x_ptr + token * K, weight, gscale, factor_ptr, row, piece, ACT, HOW, K, PIECE, WEIGHTED,
            tl.int8 == operand_ptr.dtype.element_ty, USE_PTX,
        )  # fmt: skip
    _store_row_piece(operand_ptr + row * K_PADDED, k, value, K_PADDED, PIECE, PER_WORD, USE_PTX)


@triton.jit
def prologue_kernel(
    ids_ptr,
    weights_ptr,
    row_slot_ptr,
    table_ptr,
    x_ptr,
    x_scale_ptr,
    gscale_ptr,
    operand_ptr,
    factor_ptr,
    num_slots,
    num_experts,
    num_scheduled,
    expert_offset,
    num_tiles_max,
    top_k,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    PIECE: tl.constexpr,
    ACT: tl.constexpr,
    HOW: tl.constexpr,
    WEIGHTED: tl.constexpr,
    PER_WORD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
    MANY: tl.constexpr,
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: num_scheduled + rows * cdiv(K_PADDED, PIECE); num_scheduled is num_experts, or 0 for no schedule.

    x: [T, K] values, or packed codes with x_scale, as `load_packed` reads them.
    operand: [rows, K_PADDED]; rows are tokens, or slots where HOW is "expert". factor: float32 [rows], or [T, groups].
    ACT, HOW: `formats.OperandFormat`.
    WEIGHTED: multiply x by the router weight of its token, rounded to x's dtype.
    """
    wait_for_previous_kernel(PDL)
    program = tl.program_id(0)
    if program < num_scheduled:
        schedule_expert(
            ids_ptr, row_slot_ptr, table_ptr, program, num_slots, num_experts, expert_offset, num_tiles_max,
            BLOCK_TOKENS, CHUNK, BINS, MANY,
        )  # fmt: skip
    else:
        _write_hidden(
            program - num_scheduled, x_ptr, x_scale_ptr, ids_ptr, weights_ptr, gscale_ptr, operand_ptr, factor_ptr,
            top_k, num_experts, expert_offset, K, K_PADDED, PIECE, ACT, HOW, WEIGHTED, PER_WORD, USE_PTX,
        )  # fmt: skip


@triton.jit
def requantize_kernel(
    h_ptr,
    operand_ptr,
    factor_ptr,
    num_rows_ptr,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    PIECE: tl.constexpr,
    ACT: tl.constexpr,
    HOW: tl.constexpr,
    PER_WORD: tl.constexpr,
    DIRECT: tl.constexpr,
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """The intermediate where a scale needs more of a row than a GEMM1 tile sees: h float32 [rows, K].

    HOW: "token" or "block". operand: [rows, K_PADDED]; factor: float32 [rows], or [rows, groups].
    Grid: (rows, cdiv(K_PADDED, PIECE)).
    """
    wait_for_previous_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    # Without a schedule all rows are done; those of foreign experts hold anything, and nobody reads them.
    num_rows = tl.num_programs(0) if DIRECT else tl.load(num_rows_ptr)
    if row < num_rows:
        k = piece * PIECE + tl.arange(0, PIECE)
        h_row = h_ptr + row * K
        h = tl.load(h_row + k, mask=k < K, other=0.0)
        value = _quantize_piece(h, h_row, 1.0, 1.0, factor_ptr, row, piece, ACT, HOW, K, PIECE, False, False, USE_PTX)
        _store_row_piece(operand_ptr + row * K_PADDED, k, value, K_PADDED, PIECE, PER_WORD, USE_PTX)
