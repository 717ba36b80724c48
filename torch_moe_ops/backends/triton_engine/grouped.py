"""A product of rows, sorted by expert, with the matrices of some of the experts; nothing waits for the device."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from torch_moe_ops.backends.triton_engine.elements import narrow
from torch_moe_ops.backends.triton_engine.known import Repeated
from torch_moe_ops.backends.triton_engine.plan import target_of
from torch_moe_ops.backends.triton_engine.products import dot
from torch_moe_ops.core.devices import capability_of, processors_of
from torch_moe_ops.core.schemes import next_power_of_2


class _Tile(NamedTuple):
    rows: int
    columns: int
    k: int
    num_warps: int
    num_stages: int
    programs: int  # of a multiprocessor

    def grid(self, out: Tensor) -> int:
        """Programs on the device of `out`."""
        if not out.is_cuda:
            return 2
        return processors_of(out.device) * self.programs


_LARGE, _SMALL = _Tile(128, 256, 64, 8, 4, 1), _Tile(128, 128, 32, 4, 3, 2)
_SMALLEST = 128  # rows or columns of a product that are worth a tile of _LARGE
_LARGE_SHARED = ((9, 0), (10, 0), (10, 3))  # devices whose shared memory holds what _LARGE copies ahead, 192 KiB


@triton.jit
def tile_of(tile, begin, upto, tiles, sizes, COLUMN_TILES: tl.constexpr):
    """(expert, first row, rows behind it, column tile) of a tile, those of an expert's rows next to each other."""
    number = tile // COLUMN_TILES
    e = tl.arange(0, upto.shape[0])
    expert = tl.sum((upto <= number).to(tl.int32))
    own = e == expert
    inside = number - tl.sum(tl.where(own, upto - tiles, 0))
    start = tl.sum(tl.where(own, begin, 0))
    rows = tl.sum(tl.where(own, sizes, 0))
    return expert, start, rows, inside, tile % COLUMN_TILES


@triton.jit
def sum_products(
    rows_ptr, index_ptr, w_ptr, start, size, first_row, n, K: tl.constexpr, N: tl.constexpr,
    TRANSPOSED: tl.constexpr, GATHER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """(sums [BLOCK_M, BLOCK_N] of columns n, places, which of them are live) of a tile.

    Its rows are BLOCK_M of an expert's `size` that begin at `start`, from `first_row` on.
    """
    row = first_row + tl.arange(0, BLOCK_M)
    live = row < size
    place = (start + tl.minimum(row, size - 1)).to(tl.int64)
    source = tl.load(index_ptr + place).to(tl.int64) if GATHER else place
    k = tl.arange(0, BLOCK_K)
    x = rows_ptr + source[:, None] * K + k[None, :]
    # Not beyond N: what is contiguous along N has to be seen to be so, or it is not copied ahead.
    w = w_ptr + (tl.minimum(n, N - 1)[:, None] * K + k[None, :] if TRANSPOSED else k[:, None] * N + n[None, :])
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for at in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        inside = at + k < K
        a = tl.load(x) if K % BLOCK_K == 0 else tl.load(x, mask=inside[None, :], other=0.0)
        if TRANSPOSED:
            b = tl.load(w) if K % BLOCK_K == 0 else tl.load(w, mask=inside[None, :], other=0.0)
        elif K % BLOCK_K == 0 and N % BLOCK_N == 0:
            b = tl.load(w)
        else:
            b = tl.load(w, mask=inside[:, None] & (n < N)[None, :], other=0.0)
        acc = dot(a, b if TRANSPOSED else b.trans(), acc, USE_PTX)
        x += BLOCK_K
        w += BLOCK_K if TRANSPOSED else BLOCK_K * N
    return acc, place, live


@triton.jit
def add_ranks(
    acc, low_ptr, factor_ptr, place, n, N: tl.constexpr, FACTOR_WIDTH: tl.constexpr, RANKS: tl.constexpr,
    TRANSPOSED: tl.constexpr, STEP: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """acc + low[place] @ factor, [RANKS, N], or .T of [N, RANKS] where TRANSPOSED, at columns n.

    Rows of the factor are FACTOR_WIDTH elements apart. Of low, [P, 2, RANKS], both numbers are multiplied at once.
    """
    for at in tl.range(0, RANKS, STEP, num_stages=1):
        both = tl.arange(0, 2 * STEP)
        r = at + both % STEP
        column = both // STEP * RANKS + r
        low = tl.load(low_ptr + place[:, None] * (2 * RANKS) + column[None, :], mask=(r < RANKS)[None, :], other=0.0)
        if TRANSPOSED:
            factor = factor_ptr + n[:, None] * FACTOR_WIDTH + r[None, :]
            b = tl.load(factor, mask=(n < N)[:, None] & (r < RANKS)[None, :], other=0.0)
        else:
            factor = factor_ptr + r[:, None] * FACTOR_WIDTH + n[None, :]
            b = tl.load(factor, mask=(r < RANKS)[:, None] & (n < N)[None, :], other=0.0)
        acc = dot(low, b if TRANSPOSED else b.trans(), acc, USE_PTX)
    return acc


@triton.jit
def _multiply_tile(
    rows_ptr, index_ptr, w_ptr, scale, low_ptr, factor_ptr, out_ptr, start, size, first_row, column_tile,
    K: tl.constexpr, N: tl.constexpr, OUT_WIDTH: tl.constexpr, FACTOR_WIDTH: tl.constexpr, RANKS: tl.constexpr,
    STEP: tl.constexpr, TRANSPOSED: tl.constexpr, GATHER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """One tile of grouped_kernel: BLOCK_M rows of an expert's `size` that begin at `start`, from `first_row` on."""
    n = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    acc, place, live = sum_products(
        rows_ptr, index_ptr, w_ptr, start, size, first_row, n, K, N, TRANSPOSED, GATHER, BLOCK_M, BLOCK_N, BLOCK_K,
        STAGES, USE_PTX,
    )  # fmt: skip
    acc *= scale
    if RANKS:
        acc = add_ranks(acc, low_ptr, factor_ptr, place, n, N, FACTOR_WIDTH, RANKS, TRANSPOSED, STEP, USE_PTX)
    out = out_ptr + place[:, None] * OUT_WIDTH + n[None, :]
    tl.store(out, narrow(acc, out_ptr.dtype.element_ty, USE_PTX), mask=live[:, None] & (n < N)[None, :])


@triton.jit
def expert_tiles(ends_ptr, first, count, BINS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of experts `first` and following: (their rows' begin, tiles of theirs and before, tiles, rows), [BINS] each."""
    e = tl.arange(0, BINS)
    end = tl.load(ends_ptr + first + e, mask=e < count, other=0)
    begin = tl.load(ends_ptr + first + e - 1, mask=(e < count) & (first + e > 0), other=0)
    sizes = end - begin
    tiles = (sizes + (BLOCK_M - 1)) // BLOCK_M
    return begin, tl.cumsum(tiles, 0), tiles, sizes


@triton.jit(do_not_specialize=["first", "count"])
def grouped_kernel(
    rows_ptr,
    index_ptr,
    w_ptr,
    ends_ptr,
    scale_ptr,
    low_ptr,
    factor_ptr,
    out_ptr,
    first,
    count,
    K: tl.constexpr,
    N: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    FACTOR_WIDTH: tl.constexpr,
    SCALED: tl.constexpr,
    RANKS: tl.constexpr,
    STEP: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    GATHER: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    USE_PTX: tl.constexpr,
):
    """out[r] = scale[e] * rows[index[r]] @ w[e - first] + low[r] @ factor[e].

    w: [count, K, N], or .T of [count, N, K] where TRANSPOSED; factor: likewise, of all experts, RANKS for K; 0:
    none. Its rows are FACTOR_WIDTH elements apart. low: as an Addend has it.
    scale: float32 [E] if SCALED, else 1. Rows of out are OUT_WIDTH elements apart.
    Of the rows r of experts e = first .. first + count - 1: from ends[e - 1] to ends[e]. Others are left as they are.
    Any number of programs. GATHER: index int32, else rows[r] is taken. TAIL_M: rows of a tile that is nearly empty.
    """
    column_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    begin, upto, tiles, sizes = expert_tiles(ends_ptr, first, count, BINS, BLOCK_M)
    total = tl.sum(tiles) * column_tiles
    for tile in range(tl.program_id(0), total, tl.num_programs(0)):
        expert, start, size, inside, column_tile = tile_of(tile, begin, upto, tiles, sizes, column_tiles)
        w = w_ptr + expert.to(tl.int64) * (K * N)
        factor = factor_ptr + (first + expert).to(tl.int64) * ((N if TRANSPOSED else RANKS) * FACTOR_WIDTH)
        scale = tl.load(scale_ptr + first + expert) if SCALED else 1.0
        if size - inside * BLOCK_M <= TAIL_M:
            _multiply_tile(
                rows_ptr, index_ptr, w, scale, low_ptr, factor, out_ptr, start, size, inside * BLOCK_M, column_tile,
                K, N, OUT_WIDTH, FACTOR_WIDTH, RANKS, STEP, TRANSPOSED, GATHER, TAIL_M, BLOCK_N, BLOCK_K, STAGES,
                USE_PTX,
            )  # fmt: skip
        else:
            _multiply_tile(
                rows_ptr, index_ptr, w, scale, low_ptr, factor, out_ptr, start, size, inside * BLOCK_M, column_tile,
                K, N, OUT_WIDTH, FACTOR_WIDTH, RANKS, STEP, TRANSPOSED, GATHER, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
                USE_PTX,
            )  # fmt: skip


class Addend(NamedTuple):
    """What a product gets besides: low[r] @ factor[e], or @ factor[e].T where the product is transposed.

    low: bfloat16 [P, 2, ranks], contiguous: numbers, then what rounding took of them, which else would be the largest
    error of an addend. factor: bfloat16 [experts, ranks, N], maybe columns of a wider one; [experts, N, ranks] where
    transposed.
    """

    low: Tensor
    factor: Tensor

    @property
    def ranks(self) -> int:
        return self.low.shape[2]

    @property
    def step(self) -> int:
        """Ranks that are multiplied at once: at least what a tensor core takes."""
        return min(64, max(16, next_power_of_2(self.ranks)))


class Product:
    """Rows of some experts in `out` [P, N], maybe columns of a wider matrix, those that are not theirs untouched.

    Args:
        rows: bfloat16 [R, K], contiguous; index: int32 [P], which row stands at a place; None: R = P.
        ends: int32 [experts], the row behind each expert's last one.
        scale: float32 [experts], multiplies the products; addend: is added to them then.
    """

    def __init__(
        self,
        rows: Tensor,
        index: Tensor | None,
        ends: Tensor,
        transposed: bool,
        out: Tensor,
        scale: Tensor | None = None,
        addend: Addend | None = None,
    ) -> None:
        self.rows, self.index, self.ends, self.transposed = rows, index, ends, transposed
        self.out, self.scale, self.addend = out, scale, addend
        self.tile = tile_for(out, rows.shape[1])
        self.grid = (self.tile.grid(out),)
        self.weights: Tensor | None = None

    def __call__(self, weights: Tensor, first: int, count: int) -> None:
        """weights: bfloat16 [count or more, K, N], [.., N, K] where transposed; of experts `first` and following."""
        if weights is not self.weights:
            self.weights, self.launch = weights, self._launch_with(weights)
        self.launch(self.grid, first, count)

    def _launch_with(self, weights: Tensor) -> Repeated:
        out, scale, addend, tile = self.out, self.scale, self.addend, self.tile
        return Repeated(
            grouped_kernel,
            (
                self.rows,
                out if self.index is None else self.index,
                weights,
                self.ends,
                out if scale is None else scale,
                out if addend is None else addend.low,
                out if addend is None else addend.factor,
                out,
            ),
            {"num_warps": tile.num_warps},
            K=self.rows.shape[1],
            N=out.shape[1],
            OUT_WIDTH=out.stride(0),
            FACTOR_WIDTH=0 if addend is None else addend.factor.stride(1),
            SCALED=scale is not None,
            RANKS=0 if addend is None else addend.ranks,
            STEP=0 if addend is None else addend.step,
            TRANSPOSED=self.transposed,
            GATHER=self.index is not None,
            BINS=max(32, next_power_of_2(weights.shape[0])),
            BLOCK_M=tile.rows,
            TAIL_M=64,
            BLOCK_N=tile.columns,
            BLOCK_K=tile.k,
            STAGES=tile.num_stages,
            USE_PTX=target_of(out.device)["USE_PTX"],
        )


def grouped_product(
    rows: Tensor, index: Tensor | None, weights: Tensor, ends: Tensor, first: int, transposed: bool, out: Tensor
) -> None:
    """A Product with all of `weights`."""
    Product(rows, index, ends, transposed, out)(weights, first, weights.shape[0])


def tile_for(out: Tensor, k: int) -> _Tile:
    """For a product of [P, K] that gives `out` [P, N]."""
    capability = _capability(out)
    if capability is None:
        return _Tile(64, 128, 64, 4, 1, 1)
    small = capability not in _LARGE_SHARED or out.shape[1] < _SMALLEST or k < _SMALLEST
    return _SMALL if small else _LARGE


def has_large_shared(tensor: Tensor) -> bool:
    """Whether multiprocessors of its device hold some 220 KiB of tiles."""
    capability = _capability(tensor)
    return capability is None or capability in _LARGE_SHARED


def _capability(out: Tensor) -> tuple[int, int] | None:
    """None in Triton's interpreter."""
    return capability_of(out.device) if out.is_cuda else None
