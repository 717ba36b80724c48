"""Adapters of experts inside a pass: scaling * B @ A beside each expert's matrix, for one adapter or for several.

The ranks of several adapters lie side by side, [experts, adapters * r, K]: one product serves all of them, and a row
keeps the ranks of its own adapter. So a row without an adapter gets exact zeros.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_moe_ops.core.layout import Sizes
from torch_moe_ops.gradients.outer import grouped_outer
from torch_moe_ops.gradients.pairs import Piece
from torch_moe_ops.gradients.products import grouped_product, product_dtype

_RANK_MULTIPLE = 8  # of 2-byte factors: 16 bytes, as torch's grouped_mm wants rows


class LoraArguments(NamedTuple):
    """The adapters of a layer as the ops take them.

    a13 [experts, adapters * r, hidden_size], b13 [experts, rows of w13, adapters * r], a2 [experts, adapters * r2,
    intermediate_size], b2 [experts, hidden_size, adapters * r2]: any float dtype; both of a projection, or neither.
    scaling: float32 [adapters]. ids: int32 [num_tokens], each token's adapter, another number for none; None: the only
    one, for all. merged: the weights hold the adapters already, which then add nothing, and learn as if quantizing
    were the identity (straight-through).
    """

    a13: Tensor | None
    b13: Tensor | None
    a2: Tensor | None
    b2: Tensor | None
    scaling: Tensor
    ids: Tensor | None
    merged: bool = False


class Factors:
    """One projection's adapters.

    given: a [experts, adapters * r, K] and b [experts, N, adapters * r] as they came, padded by zeros to the layout's
    sizes. da, db: gradients that are added up, of `a` and `b`, float32 or wider; None until there are some.
    found: gradients of `given`, where a pass makes those instead (ranks_on_gpu.py).
    """

    found: tuple[Tensor | None, Tensor | None] | None = None

    def __init__(self, a: Tensor, b: Tensor, lora: LoraArguments, halves: int, size: int, x: Tensor) -> None:
        """halves, size: b has `halves` blocks of rows, padded to `size` each, if they are w13's; else a's K is."""
        self.shapes, self.adapters, self.halves = (a.shape, b.shape), lora.scaling.shape[0], halves
        self.scaling, self.merged = lora.scaling.contiguous(), lora.merged  # kernels count elements from the first
        self.ids = None if lora.ids is None else lora.ids.contiguous()
        self.ranks = a.shape[1] // self.adapters
        self.dtype = product_dtype(x)
        self.wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        if halves and b.shape[1] != halves * size:
            b = F.pad(b.unflatten(1, (halves, -1)), (0, 0, 0, size - b.shape[1] // halves)).flatten(1, 2)
        elif not halves and a.shape[2] != size:
            a = F.pad(a, (0, size - a.shape[2]))
        self.given = (a, b)
        self.wants = (False, False)
        self.da: Tensor | None = None
        self.db: Tensor | None = None

    @cached_property
    def a(self) -> Tensor:
        """[experts, adapters * padded ranks, K] in the dtype of products."""
        parts = self.given[0].unflatten(1, (self.adapters, -1))
        return F.pad(parts, (0, 0, 0, self._extra())).flatten(1, 2).to(self.dtype).contiguous()

    @cached_property
    def b(self) -> Tensor:
        """[experts, N, adapters * padded ranks] in the dtype of products, the scaling in it."""
        b = self.given[1].to(self.wide) * self._of_ranks(self.ranks)  # before it is rounded
        return F.pad(b.unflatten(2, (self.adapters, -1)), (0, self._extra())).flatten(2).to(self.dtype).contiguous()

    def _extra(self) -> int:
        return -self.ranks % _RANK_MULTIPLE if self.dtype == torch.bfloat16 else 0

    def want(self, a: bool, b: bool) -> None:
        """Which gradients `gradients` shall have."""
        self.wants = (a, b)

    def addend(self, rows: Tensor, piece: Piece, first: int, token: Tensor) -> Tensor | float:
        """scaling * B A row of each row: [rows, N], wide. rows: [rows, K] in the dtype of products."""
        if self.merged:
            return 0.0
        return grouped_product(self._down(rows, piece, first, token), self._of(self.b, piece, first), piece, True).to(
            self.wide
        )

    def backward(
        self, rows: Tensor, grad: Tensor, weight: Tensor | None, piece: Piece, first: int, token: Tensor
    ) -> Tensor | float:
        """The gradient of the rows from that of the addend, which `weight` [rows, 1] does not multiply, nor the result.

        Adds weight * the gradients of A and B to what there is of them.
        """
        b = self._of(self.b, piece, first)
        through = self._own(grouped_product(grad, b, piece, False), token)
        if self.wants[1]:
            if self.db is None:
                self.db = torch.zeros_like(self.b, dtype=self.wide)
            low = _weighted(self._down(rows, piece, first, token), weight)
            self.db[first : first + b.shape[0]] += grouped_outer(grad, low, piece)
        if self.wants[0]:
            if self.da is None:
                self.da = torch.zeros_like(self.a, dtype=self.wide)
            self.da[first : first + b.shape[0]] += grouped_outer(through, _weighted(rows, weight), piece)
        if self.merged:
            return 0.0
        return grouped_product(through, self._of(self.a, piece, first), piece, False).to(self.wide)

    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        """Those that are wanted, in the shapes that a and b had."""
        da, db = self.found if self.found is not None else self._of_pieces()
        a, b = self.shapes
        if da is not None and da.shape[2] != a[2]:
            da = da[:, :, : a[2]]
        if db is not None and self.halves and db.shape[1] != b[1]:
            db = db.unflatten(1, (self.halves, -1))[:, :, : b[1] // self.halves].flatten(1, 2)
        return da, db

    def _of_pieces(self) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of `given`; zeros where no expert had a row."""
        both = zip(self.given, self.wants, strict=True)
        zeros = [torch.zeros_like(t, dtype=self.wide) if asked else None for t, asked in both]
        da, db = self.da, self.db
        if da is not None:
            da = da.unflatten(1, (self.adapters, -1))[:, :, : self.ranks].flatten(1, 2)
        if db is not None:
            db = db.unflatten(2, (self.adapters, -1))[..., : self.ranks].flatten(2) * self._of_ranks(self.ranks)
        return zeros[0] if da is None else da, zeros[1] if db is None else db

    def _down(self, rows: Tensor, piece: Piece, first: int, token: Tensor) -> Tensor:
        return self._own(grouped_product(rows, self._of(self.a, piece, first), piece, True), token)

    def _own(self, low: Tensor, token: Tensor) -> Tensor:
        """Of each row the ranks of its adapter; zeros in those of the others."""
        if self.ids is None:
            return low
        mine = self.ids[token][:, None] == torch.arange(self.adapters, device=token.device)
        return torch.where(mine[:, :, None], low.unflatten(1, (self.adapters, -1)), 0.0).flatten(1)

    def _of_ranks(self, ranks: int) -> Tensor:
        """The scaling of each rank."""
        return self.scaling.to(self.wide).repeat_interleave(ranks)

    @staticmethod
    def _of(factor: Tensor, piece: Piece, first: int) -> Tensor:
        return factor[first : first + piece.ends.shape[0]]


class Lora(NamedTuple):
    """The factors of both projections; None where a projection has none."""

    w13: Factors | None = None
    w2: Factors | None = None

    @staticmethod
    def of(lora: LoraArguments, sizes: Sizes, x: Tensor) -> Lora:
        """sizes: as in a LayerPass."""
        size, halves = sizes.intermediate_size, 2 if sizes.is_gated else 1
        w13 = None if lora.a13 is None or lora.b13 is None else Factors(lora.a13, lora.b13, lora, halves, size, x)
        w2 = None if lora.a2 is None or lora.b2 is None else Factors(lora.a2, lora.b2, lora, 0, size, x)
        return Lora(w13, w2)


NO_LORA = Lora()


def _weighted(rows: Tensor, weight: Tensor | None) -> Tensor:
    return rows if weight is None else (rows * weight).to(rows.dtype)
