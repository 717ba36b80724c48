"""The two grouped GEMMs. Grid of both: max_tiles * cdiv(padded columns, columns a program makes)."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from torch_moe_ops.kernels.triton.activations import activate_gated, activate_plain
from torch_moe_ops.kernels.triton.decode import NVFP4_ACCUMULATOR_SCALE
from torch_moe_ops.kernels.triton.mainloop import multiply, prefetch_rows, tile_of
from torch_moe_ops.kernels.triton.permute import reorder, reordered_position
from torch_moe_ops.kernels.triton.quantize import narrow, quantize_blocks


@triton.jit
def _scaled(acc, alpha, row_factor, SCHEME: tl.constexpr, HAS_FACTOR: tl.constexpr):
    """fl(acc * fl(alpha * row factor)). The power of two that decoded weights lack is part of alpha: exact."""
    if SCHEME == "nvfp4":
        if HAS_FACTOR:
            acc = acc * ((alpha * row_factor) * NVFP4_ACCUMULATOR_SCALE)[None, :]
        else:
            acc = acc * (alpha * NVFP4_ACCUMULATOR_SCALE)
    return acc


@triton.jit
def _halves(acc, HALF: tl.constexpr, BLOCK_T: tl.constexpr):
    """Gate and up rows of a tile whose rows alternate between them in runs of 8."""
    pairs = acc.reshape(HALF // 8, 2, 8, BLOCK_T).permute(0, 2, 3, 1)
    gate, up = pairs.split()
    return gate.reshape(HALF, BLOCK_T), up.reshape(HALF, BLOCK_T)


@triton.jit
def _gemm1_columns(column_tile, INTER: tl.constexpr, IS_GATED: tl.constexpr, BLOCK_N: tl.constexpr):
    """The rows of w13 that a tile multiplies; those beyond the last one are repeated, and never stored."""
    n = tl.arange(0, BLOCK_N)
    if IS_GATED:
        # Runs of 8 rows: a gate row and its up row then belong to the same thread of the tensor core's tile.
        inner = column_tile * (BLOCK_N // 2) + (n // 16) * 8 + n % 8
        columns = ((n // 8) % 2) * INTER + tl.minimum(inner, INTER - 1)
    else:
        columns = tl.minimum(column_tile * BLOCK_N + n, INTER - 1)
    return columns


@triton.jit
def _store_intermediate(
    h, h_ptr, rows, i, live, I_PADDED: tl.constexpr, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr,
    REORDER: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """h [WIDTH, BLOCK_T] -> h_ptr [rows, I_PADDED], in the order that GEMM2 reads."""
    position = i
    if REORDER:
        if WIDTH % 64 == 0:
            h = reorder(h, WIDTH, BLOCK_T)
        else:
            position = reordered_position(i)
    out = h_ptr + rows[:, None] * I_PADDED + position[None, :]
    value = narrow(h.trans(), h_ptr.dtype.element_ty, USE_PTX)
    tl.store(out, value, mask=live[:, None] & (position < I_PADDED)[None, :])


@triton.jit
def _gemm1_tile(
    operand_ptr, factor_ptr, row_slot_ptr, w_ptr, scale_ptr, alpha_ptr, bias_ptr, gscale_ptr, h_ptr,
    expert, column_tile, start, num_rows, first_row, top_k, alpha, beta, limit,
    SCHEME: tl.constexpr, H: tl.constexpr, INTER: tl.constexpr, I_PADDED: tl.constexpr,
    OPERAND_STRIDE: tl.constexpr, ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr, HAS_LIMIT: tl.constexpr,
    ALPHAS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_FACTOR: tl.constexpr, SLOT_ROWS: tl.constexpr,
    GSCALE: tl.constexpr, REORDER: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, DIRECT: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """One tile of gemm1_kernel: BLOCK_T rows of the expert from `first_row` on."""
    width: tl.constexpr = BLOCK_N // 2 if IS_GATED else BLOCK_N
    columns = _gemm1_columns(column_tile, INTER, IS_GATED, BLOCK_N)
    token = first_row + tl.arange(0, BLOCK_T)
    live = token < num_rows
    rows = (start + tl.minimum(token, num_rows - 1)).to(tl.int64)
    slot = rows.to(tl.int32) if DIRECT else tl.load(row_slot_ptr + rows)
    operand_rows = (slot if SLOT_ROWS else slot // top_k).to(tl.int64)
    rows_of_w: tl.constexpr = 2 * INTER if IS_GATED else INTER
    acc = multiply(
        operand_ptr, operand_rows, w_ptr, scale_ptr, expert, columns, 0, SCHEME, rows_of_w, H, H,
        H % BLOCK_K != 0, OPERAND_STRIDE, BLOCK_N, BLOCK_T, BLOCK_K, STAGES, USE_PTX,
    )  # fmt: skip
    factor = tl.load(factor_ptr + operand_rows) if HAS_FACTOR else None
    i = column_tile * width + tl.arange(0, width)
    first_alpha = tl.load(alpha_ptr + expert * ALPHAS) if SCHEME == "nvfp4" else 1.0
    if IS_GATED:
        gate, up = _halves(acc, width, BLOCK_T)
        second_alpha = tl.load(alpha_ptr + expert * ALPHAS + ALPHAS - 1) if SCHEME == "nvfp4" else 1.0
        gate = _scaled(gate, first_alpha, factor, SCHEME, HAS_FACTOR)
        up = _scaled(up, second_alpha, factor, SCHEME, HAS_FACTOR)
        if HAS_BIAS:
            bias = bias_ptr + expert * (2 * INTER) + i
            gate += tl.load(bias, mask=i < INTER, other=0.0)[:, None]
            up += tl.load(bias + INTER, mask=i < INTER, other=0.0)[:, None]
        h = activate_gated(gate, up, alpha, beta, limit, ACTIVATION, HAS_LIMIT)
    else:
        x = _scaled(acc, first_alpha, factor, SCHEME, HAS_FACTOR)
        if HAS_BIAS:
            x += tl.load(bias_ptr + expert * INTER + i, mask=i < INTER, other=0.0)[:, None]
        h = activate_plain(x, ACTIVATION)
    h = tl.where((i < INTER)[:, None], h, 0.0)
    if GSCALE != "none":
        gscale = tl.load(gscale_ptr + expert if GSCALE == "expert" else gscale_ptr)
        h = quantize_blocks(h.reshape(width // 16, 16, BLOCK_T), gscale, 1).reshape(width, BLOCK_T)
    _store_intermediate(h, h_ptr, rows, i, live, I_PADDED, width, BLOCK_T, REORDER, USE_PTX)


@triton.jit
def gemm1_kernel(
    operand_ptr,
    factor_ptr,
    row_slot_ptr,
    table_ptr,
    w_ptr,
    scale_ptr,
    alpha_ptr,
    bias_ptr,
    gscale_ptr,
    h_ptr,
    num_tiles_max,
    num_experts,
    expert_offset,
    top_k,
    alpha,
    beta,
    limit,
    SCHEME: tl.constexpr,
    H: tl.constexpr,
    INTER: tl.constexpr,
    I_PADDED: tl.constexpr,
    OPERAND_STRIDE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    ALPHAS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    SLOT_ROWS: tl.constexpr,
    GSCALE: tl.constexpr,
    REORDER: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TAIL_T: tl.constexpr,
    DIRECT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """h = act(alpha * (W13 @ operand) + bias), quantized where asked: h_ptr [rows, I_PADDED].

    ALPHAS: alphas per expert, 1 or 2 (gate, up). GSCALE: what to do with h before it is stored:
    "none" (round), "tensor" or "expert" (NVFP4 with gscale [] or [E]). SLOT_ROWS: operand rows are slots.
    DIRECT: no schedule, see tile_of (table_ptr then holds the ids).
    TAIL_T: tokens of a tile that is nearly empty; an expert's last tile often is, and products cost by the tile.
    """
    width: tl.constexpr = BLOCK_N // 2 if IS_GATED else BLOCK_N
    column_tiles: tl.constexpr = (I_PADDED + width - 1) // width
    # The ids are older than the prologue, which let this kernel start: they can be read while it runs.
    if PDL and not DIRECT:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    valid, expert, column_tile, start, num_rows, row_tile = tile_of(
        table_ptr, num_tiles_max, num_experts, expert_offset, column_tiles, DIRECT
    )
    if PDL and DIRECT:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    if valid:
        first_row = row_tile * BLOCK_T
        if TAIL_T < BLOCK_T and num_rows - first_row <= TAIL_T:
            _gemm1_tile(
                operand_ptr, factor_ptr, row_slot_ptr, w_ptr, scale_ptr, alpha_ptr, bias_ptr, gscale_ptr, h_ptr,
                expert, column_tile, start, num_rows, first_row, top_k, alpha, beta, limit, SCHEME, H, INTER,
                I_PADDED, OPERAND_STRIDE, ACTIVATION, IS_GATED, HAS_LIMIT, ALPHAS, HAS_BIAS, HAS_FACTOR, SLOT_ROWS,
                GSCALE, REORDER, BLOCK_N, TAIL_T, BLOCK_K, STAGES, DIRECT, USE_PTX,
            )  # fmt: skip
        else:
            _gemm1_tile(
                operand_ptr, factor_ptr, row_slot_ptr, w_ptr, scale_ptr, alpha_ptr, bias_ptr, gscale_ptr, h_ptr,
                expert, column_tile, start, num_rows, first_row, top_k, alpha, beta, limit, SCHEME, H, INTER,
                I_PADDED, OPERAND_STRIDE, ACTIVATION, IS_GATED, HAS_LIMIT, ALPHAS, HAS_BIAS, HAS_FACTOR, SLOT_ROWS,
                GSCALE, REORDER, BLOCK_N, BLOCK_T, BLOCK_K, STAGES, DIRECT, USE_PTX,
            )  # fmt: skip


@triton.jit
def _gemm2_tile(
    operand_ptr, factor_ptr, row_slot_ptr, w_ptr, scale_ptr, alpha_ptr, bias_ptr, y_ptr,
    expert, column_tile, start, num_rows, first_row, num_slots,
    SCHEME: tl.constexpr, H: tl.constexpr, INTER: tl.constexpr, OPERAND_STRIDE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_FACTOR: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, STAGES: tl.constexpr, DIRECT: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """One tile of gemm2_kernel: BLOCK_T rows of the expert from `first_row` on."""
    steps: tl.constexpr = (INTER + BLOCK_K - 1) // BLOCK_K
    k_part: tl.constexpr = INTER if SPLIT_K == 1 else (steps + SPLIT_K - 1) // SPLIT_K * BLOCK_K
    part = 0 if SPLIT_K == 1 else tl.program_id(1)
    n = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    token = first_row + tl.arange(0, BLOCK_T)
    rows = (start + tl.minimum(token, num_rows - 1)).to(tl.int64)
    acc = multiply(
        operand_ptr, rows, w_ptr, scale_ptr, expert, tl.minimum(n, H - 1), part, SCHEME, H, INTER, k_part,
        SPLIT_K * k_part != INTER or k_part % BLOCK_K != 0, OPERAND_STRIDE, BLOCK_N, BLOCK_T, BLOCK_K, STAGES, USE_PTX,
    )  # fmt: skip
    factor = tl.load(factor_ptr + rows) if HAS_FACTOR else None
    alpha = tl.load(alpha_ptr + expert) if SCHEME == "nvfp4" else 1.0
    y = _scaled(acc, alpha, factor, SCHEME, HAS_FACTOR)
    if HAS_BIAS:
        end = H if SPLIT_K == 1 else tl.where(part == 0, H, 0)  # once, not with every part
        y += tl.load(bias_ptr + expert * H + n, mask=n < end, other=0.0)[:, None]
    slot = rows if DIRECT else tl.load(row_slot_ptr + rows).to(tl.int64)
    out = y_ptr + (part * num_slots + slot)[:, None] * H + n[None, :]
    tl.store(out, y.trans(), mask=(token < num_rows)[:, None] & (n < H)[None, :])


@triton.jit
def gemm2_kernel(
    operand_ptr,
    factor_ptr,
    row_slot_ptr,
    table_ptr,
    w_ptr,
    scale_ptr,
    alpha_ptr,
    bias_ptr,
    y_ptr,
    num_slots,
    num_tiles_max,
    num_experts,
    expert_offset,
    SCHEME: tl.constexpr,
    H: tl.constexpr,
    INTER: tl.constexpr,
    OPERAND_STRIDE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TAIL_T: tl.constexpr,
    DIRECT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = alpha2 * (W2 @ operand) + bias, float32 [SPLIT_K, slots, H]: the combine adds parts and weighs slots.

    Grid: second dimension SPLIT_K, parts of K, for few tokens and a long K.
    """
    column_tiles: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    # The schedule was complete before GEMM1 let this kernel start: no need to wait for GEMM1 to read it.
    valid, expert, column_tile, start, num_rows, row_tile = tile_of(
        table_ptr, num_tiles_max, num_experts, expert_offset, column_tiles, DIRECT
    )
    if PDL:
        if PREFETCH and valid:
            columns = tl.minimum(column_tile * BLOCK_N + tl.arange(0, BLOCK_N), H - 1)
            prefetch_rows(w_ptr, expert, columns, H, INTER // 2)
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    if valid:
        first_row = row_tile * BLOCK_T
        if TAIL_T < BLOCK_T and num_rows - first_row <= TAIL_T:
            _gemm2_tile(
                operand_ptr, factor_ptr, row_slot_ptr, w_ptr, scale_ptr, alpha_ptr, bias_ptr, y_ptr, expert,
                column_tile, start, num_rows, first_row, num_slots, SCHEME, H, INTER, OPERAND_STRIDE, HAS_BIAS,
                HAS_FACTOR, BLOCK_N, TAIL_T, BLOCK_K, SPLIT_K, STAGES, DIRECT, USE_PTX,
            )  # fmt: skip
        else:
            _gemm2_tile(
                operand_ptr, factor_ptr, row_slot_ptr, w_ptr, scale_ptr, alpha_ptr, bias_ptr, y_ptr, expert,
                column_tile, start, num_rows, first_row, num_slots, SCHEME, H, INTER, OPERAND_STRIDE, HAS_BIAS,
                HAS_FACTOR, BLOCK_N, BLOCK_T, BLOCK_K, SPLIT_K, STAGES, DIRECT, USE_PTX,
            )  # fmt: skip
