"""The two grouped GEMMs. Grid of both: max_tiles * cdiv(padded columns, columns a program makes)."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_moe_ops.backends.triton_engine.activations import activate_gated, activate_plain
from torch_moe_ops.backends.triton_engine.columns import gemm1_columns, halves
from torch_moe_ops.backends.triton_engine.dependent import wait_for_previous_kernel
from torch_moe_ops.backends.triton_engine.elements import amax_of_bits, magnitude_bits, narrow
from torch_moe_ops.backends.triton_engine.mainloop import multiply, prefetch_rows, rescale, slot_of_row, tile_of
from torch_moe_ops.backends.triton_engine.permute import reorder, reordered_position
from torch_moe_ops.backends.triton_engine.quantize import (
    given_factor,
    quantize_given,
    quantize_groups,
    quantize_mx_blocks,
)


@triton.jit
def _raise_factors(h, gscale, h_factor_ptr, rows, live):
    """The factors of rows of int8 codes, of which every tile sees a part: the largest that any of them finds stays.

    In the order of bits NaN is above all numbers, and the factors begin as zeros.
    """
    amax = amax_of_bits(tl.max(magnitude_bits(h), axis=0))
    bits = given_factor(amax, gscale).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    factors = h_factor_ptr.to(tl.pointer_type(tl.int32))
    tl.atomic_max(factors + rows, bits, mask=live, sem="relaxed")


@triton.jit
def _quantize_tile(
    h, gscale_ptr, h_factor_ptr, expert, rows, column_tile, live, ACT: tl.constexpr, HOW: tl.constexpr,
    INTER: tl.constexpr, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """h [WIDTH, BLOCK_T] as GEMM2's activation format rounds it, where a tile sees all that a scale depends on.

    INT8: it is stored as int8 codes.
    """
    if HOW == "tensor" or HOW == "expert":
        gscale = tl.load(gscale_ptr + expert if HOW == "expert" else gscale_ptr)
        if INT8:
            _raise_factors(h, gscale, h_factor_ptr, rows, live)
        h = quantize_given(h, gscale, ACT, WIDTH, BLOCK_T)
    elif HOW == "block":
        if ACT == "fp8":
            h, scale = quantize_groups(h, WIDTH, BLOCK_T)
            group = column_tile * (WIDTH // 128) + tl.arange(0, WIDTH // 128)
            in_row: tl.constexpr = (INTER + 127) // 128
            out = h_factor_ptr + rows[None, :] * in_row + group[:, None]
            tl.store(out, scale, mask=(group < in_row)[:, None] & live[None, :])
        else:
            h = quantize_mx_blocks(h, ACT, WIDTH, BLOCK_T)
    return h


@triton.jit
def _store_intermediate(
    h, h_ptr, rows, i, live, I_PADDED: tl.constexpr, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr,
    PER_WORD: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """h [WIDTH, BLOCK_T] -> h_ptr [rows, I_PADDED], in the order that GEMM2 reads."""
    position = i
    if WIDTH % 64 == 0:
        h = reorder(h, WIDTH, BLOCK_T, PER_WORD)
    else:
        position = reordered_position(i, PER_WORD)
    out = h_ptr + rows[:, None] * I_PADDED + position[None, :]
    value = narrow(h.trans(), h_ptr.dtype.element_ty, USE_PTX)
    tl.store(out, value, mask=live[:, None] & (position < I_PADDED)[None, :])


@triton.jit
def _gemm1_tile(
    operand_ptr, factor_ptr, row_slot_ptr, w_ptr, scale_ptr, zero_ptr, alpha_ptr, bias_ptr, gscale_ptr, h_ptr,
    h_factor_ptr, expert, column_tile, start, num_rows, first_row, num_slots, top_k, alpha, beta, limit,
    FORMAT: tl.constexpr, ACT: tl.constexpr, H_HOW: tl.constexpr, FACTOR: tl.constexpr, H: tl.constexpr,
    INTER: tl.constexpr, I_PADDED: tl.constexpr, OPERAND_STRIDE: tl.constexpr, ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr, HAS_LIMIT: tl.constexpr, ALPHAS: tl.constexpr, HAS_BIAS: tl.constexpr,
    SLOT_ROWS: tl.constexpr, PER_WORD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, SCALES: tl.constexpr, DIRECT: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """One tile of gemm1_kernel: BLOCK_T rows of the expert from `first_row` on."""
    width: tl.constexpr = BLOCK_N // 2 if IS_GATED else BLOCK_N
    columns = gemm1_columns(column_tile, INTER, IS_GATED, BLOCK_N)
    token = first_row + tl.arange(0, BLOCK_T)
    live = token < num_rows
    rows = (start + tl.minimum(token, num_rows - 1)).to(tl.int64)
    slot = rows.to(tl.int32) if DIRECT else slot_of_row(row_slot_ptr, rows, num_slots)
    operand_rows = (slot if SLOT_ROWS else slot // top_k).to(tl.int64)
    rows_of_w: tl.constexpr = 2 * INTER if IS_GATED else INTER
    acc = multiply(
        operand_ptr, operand_rows, live, factor_ptr, w_ptr, scale_ptr, zero_ptr, expert, columns, 0, FORMAT, FACTOR,
        rows_of_w, INTER, H, H, H % BLOCK_K != 0, OPERAND_STRIDE, BLOCK_N, BLOCK_T, BLOCK_K, STAGES, SCALES, USE_PTX,
    )  # fmt: skip
    acc = rescale(acc, alpha_ptr, factor_ptr, operand_rows, expert, columns, FORMAT, FACTOR, ALPHAS, rows_of_w)
    i = column_tile * width + tl.arange(0, width)
    if IS_GATED:
        gate, up = halves(acc, width, BLOCK_T)
        if HAS_BIAS:
            bias = bias_ptr + expert * (2 * INTER) + i
            gate += tl.load(bias, mask=i < INTER, other=0.0)[:, None]
            up += tl.load(bias + INTER, mask=i < INTER, other=0.0)[:, None]
        h = activate_gated(gate, up, alpha, beta, limit, ACTIVATION, HAS_LIMIT)
    else:
        if HAS_BIAS:
            acc += tl.load(bias_ptr + expert * INTER + i, mask=i < INTER, other=0.0)[:, None]
        h = activate_plain(acc, ACTIVATION)
    h = tl.where((i < INTER)[:, None], h, 0.0)
    h = _quantize_tile(
        h, gscale_ptr, h_factor_ptr, expert, rows, column_tile, live, ACT, H_HOW, INTER, width, BLOCK_T,
        tl.int8 == h_ptr.dtype.element_ty,
    )  # fmt: skip
    _store_intermediate(h, h_ptr, rows, i, live, I_PADDED, width, BLOCK_T, PER_WORD, USE_PTX)


@triton.jit
def gemm1_kernel(
    operand_ptr,
    factor_ptr,
    row_slot_ptr,
    table_ptr,
    w_ptr,
    scale_ptr,
    zero_ptr,
    alpha_ptr,
    bias_ptr,
    gscale_ptr,
    h_ptr,
    h_factor_ptr,
    num_slots,
    num_tiles_max,
    num_experts,
    expert_offset,
    top_k,
    alpha,
    beta,
    limit,
    FORMAT: tl.constexpr,
    ACT: tl.constexpr,
    H_HOW: tl.constexpr,
    FACTOR: tl.constexpr,
    H: tl.constexpr,
    INTER: tl.constexpr,
    I_PADDED: tl.constexpr,
    OPERAND_STRIDE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    ALPHAS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SLOT_ROWS: tl.constexpr,
    PER_WORD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TAIL_T: tl.constexpr,
    DIRECT: tl.constexpr,
    EARLY_TILES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SCALES: tl.constexpr,
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """h = act(alpha * (W13 @ operand) + bias), quantized where asked: h_ptr [rows, I_PADDED].

    FORMAT: `formats.WeightFormat`. ACT, FACTOR: `formats.OperandFormat` of the hidden states. H_HOW: of the
    intermediate, where a tile can make it; "none": round. ALPHAS: see `mainloop.rescale`.
    SLOT_ROWS: operand rows are slots. PER_WORD: of GEMM2's weights, which order the intermediate is stored in.
    DIRECT: no schedule, see tile_of (table_ptr then holds the ids). EARLY_TILES: read table_ptr before waiting, as the
    launch in front does not write it, and waited for who does.
    TAIL_T: tokens of a tile that is nearly empty; an expert's last tile often is, and products cost by the tile.
    """
    width: tl.constexpr = BLOCK_N // 2 if IS_GATED else BLOCK_N
    column_tiles: tl.constexpr = (I_PADDED + width - 1) // width
    if not EARLY_TILES:
        wait_for_previous_kernel(PDL)
    valid, expert, column_tile, start, num_rows, row_tile = tile_of(
        table_ptr, num_slots, num_tiles_max, num_experts, expert_offset, column_tiles, DIRECT, EARLY_TILES
    )
    if EARLY_TILES:
        wait_for_previous_kernel(PDL)
    if valid:
        first_row = row_tile * BLOCK_T
        if TAIL_T < BLOCK_T and num_rows - first_row <= TAIL_T:
            _gemm1_tile(
                operand_ptr, factor_ptr, row_slot_ptr, w_ptr, scale_ptr, zero_ptr, alpha_ptr, bias_ptr, gscale_ptr,
                h_ptr, h_factor_ptr, expert, column_tile, start, num_rows, first_row, num_slots, top_k, alpha, beta,
                limit, FORMAT, ACT, H_HOW, FACTOR, H, INTER, I_PADDED, OPERAND_STRIDE, ACTIVATION, IS_GATED, HAS_LIMIT,
                ALPHAS, HAS_BIAS, SLOT_ROWS, PER_WORD, BLOCK_N, TAIL_T, BLOCK_K, STAGES, SCALES, DIRECT, USE_PTX,
            )  # fmt: skip
        else:
            _gemm1_tile(
                operand_ptr, factor_ptr, row_slot_ptr, w_ptr, scale_ptr, zero_ptr, alpha_ptr, bias_ptr, gscale_ptr,
                h_ptr, h_factor_ptr, expert, column_tile, start, num_rows, first_row, num_slots, top_k, alpha, beta,
                limit, FORMAT, ACT, H_HOW, FACTOR, H, INTER, I_PADDED, OPERAND_STRIDE, ACTIVATION, IS_GATED, HAS_LIMIT,
                ALPHAS, HAS_BIAS, SLOT_ROWS, PER_WORD, BLOCK_N, BLOCK_T, BLOCK_K, STAGES, SCALES, DIRECT, USE_PTX,
            )  # fmt: skip


@triton.jit
def _gemm2_tile(
    operand_ptr, factor_ptr, row_slot_ptr, w_ptr, scale_ptr, zero_ptr, alpha_ptr, bias_ptr, y_ptr,
    expert, column_tile, start, num_rows, first_row, num_slots, FORMAT: tl.constexpr, FACTOR: tl.constexpr,
    H: tl.constexpr, INTER: tl.constexpr, OPERAND_STRIDE: tl.constexpr, ALPHAS: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr, STAGES: tl.constexpr, SCALES: tl.constexpr, DIRECT: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """One tile of gemm2_kernel: BLOCK_T rows of the expert from `first_row` on."""
    steps: tl.constexpr = (INTER + BLOCK_K - 1) // BLOCK_K
    k_part: tl.constexpr = INTER if SPLIT_K == 1 else (steps + SPLIT_K - 1) // SPLIT_K * BLOCK_K
    part = 0 if SPLIT_K == 1 else tl.program_id(1)
    n = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.minimum(n, H - 1)
    token = first_row + tl.arange(0, BLOCK_T)
    live = token < num_rows
    rows = (start + tl.minimum(token, num_rows - 1)).to(tl.int64)
    acc = multiply(
        operand_ptr, rows, live, factor_ptr, w_ptr, scale_ptr, zero_ptr, expert, columns, part, FORMAT, FACTOR, H, H,
        INTER, k_part, SPLIT_K * k_part != INTER or k_part % BLOCK_K != 0, OPERAND_STRIDE, BLOCK_N, BLOCK_T, BLOCK_K,
        STAGES, SCALES, USE_PTX,
    )  # fmt: skip
    y = rescale(acc, alpha_ptr, factor_ptr, rows, expert, columns, FORMAT, FACTOR, ALPHAS, H)
    if HAS_BIAS:
        end = H if SPLIT_K == 1 else tl.where(part == 0, H, 0)  # once, not with every part
        y += tl.load(bias_ptr + expert * H + n, mask=n < end, other=0.0)[:, None]
    slot = rows if DIRECT else slot_of_row(row_slot_ptr, rows, num_slots).to(tl.int64)
    out = y_ptr + (part * num_slots + slot)[:, None] * H + n[None, :]
    tl.store(out, y.trans(), mask=live[:, None] & (n < H)[None, :])


@triton.jit
def gemm2_kernel(
    operand_ptr,
    factor_ptr,
    row_slot_ptr,
    table_ptr,
    w_ptr,
    scale_ptr,
    zero_ptr,
    alpha_ptr,
    bias_ptr,
    y_ptr,
    num_slots,
    num_tiles_max,
    num_experts,
    expert_offset,
    FORMAT: tl.constexpr,
    FACTOR: tl.constexpr,
    H: tl.constexpr,
    INTER: tl.constexpr,
    OPERAND_STRIDE: tl.constexpr,
    ALPHAS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TAIL_T: tl.constexpr,
    DIRECT: tl.constexpr,
    EARLY_TILES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
    SCALES: tl.constexpr,
    PREFETCH: tl.constexpr,
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = alpha2 * (W2 @ operand) + bias, float32 [SPLIT_K, slots, H]: the combine adds parts and weighs slots.

    Grid: second dimension SPLIT_K, parts of K, for few tokens and a long K.
    PREFETCH: bytes of a weight row to ask the L2 for while GEMM1 runs, 0: none; with EARLY_TILES, as in gemm1_kernel.
    """
    column_tiles: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    if not EARLY_TILES:
        wait_for_previous_kernel(PDL)
    valid, expert, column_tile, start, num_rows, row_tile = tile_of(
        table_ptr, num_slots, num_tiles_max, num_experts, expert_offset, column_tiles, DIRECT, EARLY_TILES
    )
    if EARLY_TILES:
        if PREFETCH and valid:
            columns = tl.minimum(column_tile * BLOCK_N + tl.arange(0, BLOCK_N), H - 1)
            prefetch_rows(w_ptr, expert, columns, H, PREFETCH)
        wait_for_previous_kernel(PDL)
    if valid:
        first_row = row_tile * BLOCK_T
        if TAIL_T < BLOCK_T and num_rows - first_row <= TAIL_T:
            _gemm2_tile(
                operand_ptr, factor_ptr, row_slot_ptr, w_ptr, scale_ptr, zero_ptr, alpha_ptr, bias_ptr, y_ptr, expert,
                column_tile, start, num_rows, first_row, num_slots, FORMAT, FACTOR, H, INTER, OPERAND_STRIDE, ALPHAS,
                HAS_BIAS, BLOCK_N, TAIL_T, BLOCK_K, SPLIT_K, STAGES, SCALES, DIRECT, USE_PTX,
            )  # fmt: skip
        else:
            _gemm2_tile(
                operand_ptr, factor_ptr, row_slot_ptr, w_ptr, scale_ptr, zero_ptr, alpha_ptr, bias_ptr, y_ptr, expert,
                column_tile, start, num_rows, first_row, num_slots, FORMAT, FACTOR, H, INTER, OPERAND_STRIDE, ALPHAS,
                HAS_BIAS, BLOCK_N, BLOCK_T, BLOCK_K, SPLIT_K, STAGES, SCALES, DIRECT, USE_PTX,
            )  # fmt: skip
