"""First launch: the schedule, and the hidden states as GEMM1 wants to read them.

Programs below num_scheduled write the schedule, the others one piece of an activation row each.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from torch_moe_ops.kernels.triton.permute import reorder
from torch_moe_ops.kernels.triton.quantize import (
    decode_e2m1,
    decode_e4m3,
    dynamic_gscale,
    narrow,
    quantize_blocks,
    reciprocal,
)
from torch_moe_ops.kernels.triton.schedule import schedule_expert


@triton.jit
def _row_amax(x_row, weight, K: tl.constexpr, PIECE: tl.constexpr, WEIGHTED: tl.constexpr, USE_PTX: tl.constexpr):
    """max |x| over a whole row."""
    offsets = tl.arange(0, PIECE)
    largest = tl.zeros((PIECE,), tl.float32)
    for begin in range(0, K, PIECE):
        x = tl.load(x_row + begin + offsets, mask=begin + offsets < K, other=0.0)
        if WEIGHTED:
            x = narrow(x.to(tl.float32) * weight, x_row.dtype.element_ty, USE_PTX)
        largest = tl.maximum(largest, tl.abs(x.to(tl.float32)))
    return tl.max(largest)


@triton.jit
def _load_packed(codes_row, scale_row, k, K: tl.constexpr):
    """Values code * block scale of a packed row at natural indices k."""
    byte = tl.load(codes_row + k // 2, mask=k < K, other=0).to(tl.int32)
    scale = tl.load(scale_row + k // 16, mask=k < K, other=0).to(tl.int32)
    return decode_e2m1((byte >> ((k & 1) * 4)) & 15) * decode_e4m3(scale)


@triton.jit
def _quantized(x, gscale, PIECE: tl.constexpr):
    return quantize_blocks(x.reshape(PIECE // 16, 16), gscale, 1).reshape(PIECE)


@triton.jit
def store_row_piece(
    out_row, k, value, K_PADDED: tl.constexpr, PIECE: tl.constexpr, REORDER: tl.constexpr, USE_PTX: tl.constexpr
):  # fmt: skip
    """Store values of natural indices k = begin + arange(PIECE), begin a multiple of 64, in the GEMM's order."""
    if REORDER:
        value = reorder(value.reshape(PIECE, 1), PIECE, 1).reshape(PIECE)
    tl.store(out_row + k, narrow(value, out_row.dtype.element_ty, USE_PTX), mask=k < K_PADDED)


@triton.jit
def _write_hidden(
    program, x_ptr, x_scale_ptr, ids_ptr, weights_ptr, gscale_ptr, operand_ptr, factor_ptr, top_k, num_experts,
    expert_offset, K: tl.constexpr, K_PADDED: tl.constexpr, PIECE: tl.constexpr, MODE: tl.constexpr,
    WEIGHTED: tl.constexpr, REORDER: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    pieces: tl.constexpr = (K_PADDED + PIECE - 1) // PIECE
    row = (program // pieces).to(tl.int64)
    piece = program % pieces
    k = piece * PIECE + tl.arange(0, PIECE)
    token = row // top_k if MODE == "expert" else row
    out_row = operand_ptr + row * K_PADDED
    if MODE == "packed":
        value = _load_packed(x_ptr + token * (K // 2), x_scale_ptr + token * (K // 16), k, K)
    else:
        weight = tl.load(weights_ptr + token) if WEIGHTED else 1.0
        x = tl.load(x_ptr + token * K + k, mask=k < K, other=0.0)
        if WEIGHTED:
            x = narrow(x.to(tl.float32) * weight, x_ptr.dtype.element_ty, USE_PTX)
        value = x.to(tl.float32)
        if MODE == "tensor":
            value = _quantized(value, tl.load(gscale_ptr), PIECE)
        elif MODE == "expert":
            local = tl.load(ids_ptr + row) - expert_offset
            mine = (local >= 0) & (local < num_experts)
            value = _quantized(value, tl.load(gscale_ptr + local, mask=mine, other=1.0), PIECE)
        elif MODE == "token":
            gscale = dynamic_gscale(_row_amax(x_ptr + token * K, weight, K, PIECE, WEIGHTED, USE_PTX))
            value = _quantized(value, gscale, PIECE)
            if piece == 0:
                tl.store(factor_ptr + row, reciprocal(gscale))
    store_row_piece(out_row, k, value, K_PADDED, PIECE, REORDER, USE_PTX)


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
    MODE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    REORDER: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: num_scheduled + rows * cdiv(K_PADDED, PIECE); num_scheduled is num_experts, or 0 for no schedule.

    x: [T, K] values, or packed codes [T, K / 2] with x_scale [T, K / 16].
    operand: [rows, K_PADDED]; rows are tokens, or slots where MODE is "expert". factor: float32 [T].
    MODE: "copy", "tensor", "expert", "token" (NVFP4, by where gscale comes from), "packed".
    WEIGHTED: multiply x by the router weight of its token, rounded to x's dtype.
    """
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    if program < num_scheduled:
        schedule_expert(
            ids_ptr, row_slot_ptr, table_ptr, program, num_slots, num_experts, expert_offset, num_tiles_max,
            BLOCK_TOKENS, CHUNK, BINS,
        )  # fmt: skip
    else:
        _write_hidden(
            program - num_scheduled, x_ptr, x_scale_ptr, ids_ptr, weights_ptr, gscale_ptr, operand_ptr, factor_ptr,
            top_k, num_experts, expert_offset, K, K_PADDED, PIECE, MODE, WEIGHTED, REORDER, USE_PTX,
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
    DIRECT: tl.constexpr,
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """The intermediate with a scale of its own per row: h float32 [rows, K] -> operand [rows, K_PADDED], factor [rows].

    Grid: (rows, cdiv(K_PADDED, PIECE)). A separate launch, as no GEMM1 tile sees a whole row.
    """
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    # Without a schedule all rows are done; those of foreign experts hold anything, and nobody reads them.
    num_rows = tl.num_programs(0) if DIRECT else tl.load(num_rows_ptr)
    if row < num_rows:
        k = piece * PIECE + tl.arange(0, PIECE)
        gscale = dynamic_gscale(_row_amax(h_ptr + row * K, 1.0, K, PIECE, False, USE_PTX))
        value = _quantized(tl.load(h_ptr + row * K + k, mask=k < K, other=0.0), gscale, PIECE)
        store_row_piece(operand_ptr + row * K_PADDED, k, value, K_PADDED, PIECE, True, USE_PTX)
        if piece == 0:
            tl.store(factor_ptr + row, reciprocal(gscale))
