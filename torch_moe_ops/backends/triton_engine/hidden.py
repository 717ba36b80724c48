"""GEMM1 of rows sorted by expert and what follows it in a tile: the intermediate, or on the way back its gradients.

What the product sums never leaves float32: rounding it to bfloat16 in between would be the largest error of a pass.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_moe_ops.backends.triton_engine.activation_gradients import gradient_plain, gradients_gated
from torch_moe_ops.backends.triton_engine.activations import activate_gated, activate_plain
from torch_moe_ops.backends.triton_engine.elements import narrow
from torch_moe_ops.backends.triton_engine.grouped import add_ranks, expert_tiles, tile_of
from torch_moe_ops.backends.triton_engine.products import dot


@triton.jit
def _sums(
    rows_ptr, source, w_ptr, i, K: tl.constexpr, INTER: tl.constexpr, IS_GATED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """(gate, up) [BLOCK_M, BLOCK_I], float32; the same twice where nothing is gated."""
    k = tl.arange(0, BLOCK_K)
    x = rows_ptr + source[:, None] * K + k[None, :]
    w = w_ptr + tl.minimum(i, INTER - 1)[:, None] * K + k[None, :]
    gate = tl.zeros((BLOCK_M, BLOCK_I), tl.float32)
    up = gate
    for at in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        inside = at + k < K
        a = tl.load(x) if K % BLOCK_K == 0 else tl.load(x, mask=inside[None, :], other=0.0)
        b = tl.load(w) if K % BLOCK_K == 0 else tl.load(w, mask=inside[None, :], other=0.0)
        gate = dot(a, b, gate, USE_PTX)
        if IS_GATED:
            c = tl.load(w + INTER * K) if K % BLOCK_K == 0 else tl.load(w + INTER * K, mask=inside[None, :], other=0.0)
            up = dot(a, c, up, USE_PTX)
        x += BLOCK_K
        w += BLOCK_K
    return gate, up


@triton.jit
def _half(
    acc, factor_ptr, bias_ptr, low_ptr, b_ptr, place, expert, i, HALF: tl.constexpr, INTER: tl.constexpr,
    COLUMNS: tl.constexpr, FACTORS: tl.constexpr, RANKS: tl.constexpr, STEP: tl.constexpr, HAS_BIAS: tl.constexpr,
    USE_PTX: tl.constexpr,
):  # fmt: skip
    """(gate or up before the activation, the factor of its weights)."""
    factor = tl.load(factor_ptr + expert * FACTORS + (HALF if FACTORS == 2 else 0))
    acc *= factor
    n = HALF * INTER + i
    if RANKS:
        b = b_ptr + expert * (COLUMNS * RANKS)
        acc = add_ranks(acc, low_ptr, b, place, n, COLUMNS, RANKS, RANKS, True, STEP, USE_PTX)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + expert * COLUMNS + n, mask=i < INTER, other=0.0)[None, :]
    return acc, factor


@triton.jit
def _column_halves(x):
    """The first and the second half of the columns, which tiles of tensor cores have in different registers."""
    pairs = x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1)
    return pairs.split()


@triton.jit
def _column_quarters(x):
    first, second = _column_halves(x)
    a, b = _column_halves(first)
    c, d = _column_halves(second)
    return a, b, c, d


@triton.jit
def _finish(
    gate, up, first_column, place, live, weight, u_ptr, z_ptr, gate_factor, up_factor, alpha, beta, limit,
    INTER: tl.constexpr, ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr, HAS_LIMIT: tl.constexpr,
    U_WIDTH: tl.constexpr, BACKWARD: tl.constexpr, WRITES_H: tl.constexpr, TIMES_FACTOR: tl.constexpr,
    ROUNDED: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """Some columns of a tile from their gate and up: writes what hidden_kernel does, and returns <h, u> of each row.

    Only some, as all of a tile's columns at once would need more registers than there are.
    """
    columns: tl.constexpr = 2 * INTER if IS_GATED else INTER
    i = first_column + tl.arange(0, gate.shape[1])
    kept = live[:, None] & (i < INTER)[None, :]
    at_u = u_ptr + place[:, None] * U_WIDTH + i[None, :]
    part = tl.zeros((gate.shape[0],), tl.float32)
    if IS_GATED:
        h = activate_gated(gate, up, alpha, beta, limit, ACTIVATION, HAS_LIMIT)
    else:
        h = activate_plain(gate, ACTIVATION)
    h = narrow(h, ROUNDED, USE_PTX).to(tl.float32)
    if BACKWARD:
        u = tl.load(at_u, mask=kept, other=0.0).to(tl.float32)
        part = tl.sum(tl.where(kept, h * u, 0.0), axis=1)
        u *= weight[:, None]
        at_z = z_ptr + place[:, None] * columns + i[None, :]
        if U_WIDTH != INTER or not IS_GATED:  # u may lie in z
            tl.debug_barrier()  # the thread that writes an element need not be the one that has read it
        if IS_GATED:
            of_gate, of_up = gradients_gated(gate, up, alpha, beta, limit, ACTIVATION, HAS_LIMIT)
            of_up *= u * up_factor if TIMES_FACTOR else u
            tl.store(at_z + INTER, narrow(of_up, z_ptr.dtype.element_ty, USE_PTX), mask=kept)
        else:
            of_gate = gradient_plain(gate, ACTIVATION)
        of_gate *= u * gate_factor if TIMES_FACTOR else u
        tl.store(at_z, narrow(of_gate, z_ptr.dtype.element_ty, USE_PTX), mask=kept)
        if WRITES_H:
            tl.debug_barrier()  # likewise
    if WRITES_H:
        tl.store(at_u, narrow(h, u_ptr.dtype.element_ty, USE_PTX), mask=kept)
    return part


@triton.jit
def _hidden_tile(
    rows_ptr, token_ptr, w_ptr, factor_ptr, bias_ptr, low_ptr, b_ptr, u_ptr, z_ptr, part_ptr, order_ptr, weights_ptr,
    expert, start, size, first_row, column_tile, alpha, beta, limit, K: tl.constexpr, INTER: tl.constexpr,
    U_WIDTH: tl.constexpr, FACTORS: tl.constexpr, RANKS: tl.constexpr, STEP: tl.constexpr, ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr, HAS_LIMIT: tl.constexpr, HAS_BIAS: tl.constexpr, BACKWARD: tl.constexpr,
    WEIGHTED: tl.constexpr, WRITES_H: tl.constexpr, WANTS_PARTS: tl.constexpr, TIMES_FACTOR: tl.constexpr,
    ROUNDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    USE_PTX: tl.constexpr,
):  # fmt: skip
    """One tile of hidden_kernel: BLOCK_M rows of an expert's `size` that begin at `start`, from `first_row` on."""
    columns: tl.constexpr = 2 * INTER if IS_GATED else INTER
    tiles: tl.constexpr = (INTER + BLOCK_I - 1) // BLOCK_I
    row = first_row + tl.arange(0, BLOCK_M)
    live = row < size
    place = (start + tl.minimum(row, size - 1)).to(tl.int64)
    source = tl.load(token_ptr + place).to(tl.int64)
    i = column_tile * BLOCK_I + tl.arange(0, BLOCK_I)
    gate, up = _sums(
        rows_ptr, source, w_ptr, i, K, INTER, IS_GATED, BLOCK_M, BLOCK_I, BLOCK_K, STAGES, USE_PTX
    )  # fmt: skip
    gate, gate_factor = _half(
        gate, factor_ptr, bias_ptr, low_ptr, b_ptr, place, expert, i, 0, INTER, columns, FACTORS, RANKS, STEP, HAS_BIAS,
        USE_PTX,
    )  # fmt: skip
    up_factor = gate_factor
    if IS_GATED:
        up, up_factor = _half(
            up, factor_ptr, bias_ptr, low_ptr, b_ptr, place, expert, i, 1, INTER, columns, FACTORS, RANKS, STEP,
            HAS_BIAS, USE_PTX,
        )  # fmt: skip
    weight = tl.full((BLOCK_M,), 1.0, tl.float32)
    if BACKWARD and WEIGHTED:
        weight = tl.load(weights_ptr + tl.load(order_ptr + place)).to(tl.float32)
    part = tl.zeros((BLOCK_M,), tl.float32)
    gates = _column_quarters(gate)
    ups = _column_quarters(up)
    for quarter in tl.static_range(4):
        part += _finish(
            gates[quarter], ups[quarter], column_tile * BLOCK_I + quarter * (BLOCK_I // 4), place, live, weight, u_ptr,
            z_ptr, gate_factor, up_factor, alpha, beta, limit, INTER, ACTIVATION, IS_GATED, HAS_LIMIT, U_WIDTH,
            BACKWARD, WRITES_H, TIMES_FACTOR, ROUNDED, USE_PTX,
        )  # fmt: skip
    if WANTS_PARTS:
        tl.store(part_ptr + place * tiles + column_tile, part, mask=live)


@triton.jit(do_not_specialize=["first", "count"])
def hidden_kernel(
    rows_ptr,
    token_ptr,
    w_ptr,
    ends_ptr,
    factor_ptr,
    bias_ptr,
    low_ptr,
    b_ptr,
    u_ptr,
    z_ptr,
    part_ptr,
    order_ptr,
    weights_ptr,
    alpha,
    beta,
    limit,
    first,
    count,
    K: tl.constexpr,
    INTER: tl.constexpr,
    U_WIDTH: tl.constexpr,
    FACTORS: tl.constexpr,
    RANKS: tl.constexpr,
    STEP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BACKWARD: tl.constexpr,
    WEIGHTED: tl.constexpr,
    WRITES_H: tl.constexpr,
    WANTS_PARTS: tl.constexpr,
    TIMES_FACTOR: tl.constexpr,
    ROUNDED: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL_M: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    USE_PTX: tl.constexpr,
):
    """Of the rows of experts first .. first + count - 1, any number of programs:

    g = factor * rows[token] @ w.T + low @ b.T + bias, gate and up, h = act(g), rounded to ROUNDED; and if BACKWARD, u
    being the gradient of h where the routing weight is 1: z = act'(g) * u * the weight of the slot (where WEIGHTED),
    times the factor again if TIMES_FACTOR; part = <h, u> of a tile's columns if WANTS_PARTS. h replaces u if WRITES_H.

    w: bfloat16 [count, columns, K], columns INTER or 2 * INTER, gate then up. factor: float32 [E, FACTORS], one or that
    of gate and that of up. low, b: as in grouped_kernel. bias: float32 [E, columns]. u: [rows, INTER], U_WIDTH elements
    apart: the last INTER columns of z, or of its own. z: [rows, columns]. part: float32 [rows, cdiv(INTER, BLOCK_I)].
    """
    columns: tl.constexpr = 2 * INTER if IS_GATED else INTER
    column_tiles: tl.constexpr = (INTER + BLOCK_I - 1) // BLOCK_I
    begin, upto, tiles, sizes = expert_tiles(ends_ptr, first, count, BINS, BLOCK_M)
    total = tl.sum(tiles) * column_tiles
    for tile in range(tl.program_id(0), total, tl.num_programs(0)):
        local, start, size, inside, column_tile = tile_of(tile, begin, upto, tiles, sizes, column_tiles)
        w = w_ptr + local.to(tl.int64) * (K * columns)
        expert = (first + local).to(tl.int64)
        if size - inside * BLOCK_M <= TAIL_M:
            _hidden_tile(
                rows_ptr, token_ptr, w, factor_ptr, bias_ptr, low_ptr, b_ptr, u_ptr, z_ptr, part_ptr, order_ptr,
                weights_ptr, expert, start, size, inside * BLOCK_M, column_tile, alpha, beta, limit, K, INTER, U_WIDTH,
                FACTORS, RANKS, STEP, ACTIVATION, IS_GATED, HAS_LIMIT, HAS_BIAS, BACKWARD, WEIGHTED, WRITES_H,
                WANTS_PARTS, TIMES_FACTOR, ROUNDED, TAIL_M, BLOCK_I, BLOCK_K, STAGES, USE_PTX,
            )  # fmt: skip
        else:
            _hidden_tile(
                rows_ptr, token_ptr, w, factor_ptr, bias_ptr, low_ptr, b_ptr, u_ptr, z_ptr, part_ptr, order_ptr,
                weights_ptr, expert, start, size, inside * BLOCK_M, column_tile, alpha, beta, limit, K, INTER, U_WIDTH,
                FACTORS, RANKS, STEP, ACTIVATION, IS_GATED, HAS_LIMIT, HAS_BIAS, BACKWARD, WEIGHTED, WRITES_H,
                WANTS_PARTS, TIMES_FACTOR, ROUNDED, BLOCK_M, BLOCK_I, BLOCK_K, STAGES, USE_PTX,
            )  # fmt: skip
