"""Adapters in a pass of Triton's kernels (on_gpu.py): all rows of all experts in one launch of each thin product.

What a factor makes of rows has the scaling in it, and is kept as two numbers of bfloat16, the second what rounding took
of the first. The product beside which an adapter
stands adds that times the other factor to its own sums, before it rounds them: no addend is ever written.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from torch_moe_ops.backends.triton_engine.backward_pass import RANK_CHUNK, Pass, RanksBySlot
from torch_moe_ops.core.schemes import ceil_div
from torch_moe_ops.gradients.lora import Factors
from torch_moe_ops.gradients.products import operand

if TYPE_CHECKING:
    from torch_moe_ops.backends.triton_engine.grouped import Addend


class RanksOnGpu:
    """The adapters of one projection in a pass.

    low, through: what `down` and `back` gave for every pair, [pairs, 2, ranks].
    """

    def __init__(self, factors: Factors, p: Pass) -> None:
        from torch_moe_ops.backends.triton_engine import ranks

        self.factors, self.p, self.engine = factors, p, ranks
        self.a, self.b = map(operand, factors.given)
        self.owners = ranks.Ranks(factors.scaling, factors.ids)

    @cached_property
    def low(self) -> Tensor:
        return self._of_pairs()

    @cached_property
    def through(self) -> Tensor:
        return self._of_pairs()

    def _of_pairs(self) -> Tensor:
        return self.a.new_empty((self.p.slots.order.shape[0], 2, self.a.shape[1]))

    def down(self, rows: Tensor, index: Tensor | None) -> None:
        """low: scaling * A row. rows, index: as products take them."""
        count = self.p.sizes.num_experts
        self.engine.low_rows(rows, index, self.a, self.p.slots, True, self.owners, 0, count, self.low)

    def back(self, grad: Tensor, index: Tensor | None, first: int, last: int) -> None:
        """through: scaling * B.T grad, for pairs of experts first .. last - 1."""
        self.engine.low_rows(
            grad, index, self.b, self.p.slots, False, self.owners, first, last - first, self.through
        )  # fmt: skip

    def forward_addend(self) -> Addend | None:
        """B times low."""
        return self._addend(self.low, self.b)

    def backward_addend(self, columns: slice | None = None) -> Addend | None:
        """A.T times through, of some columns or of all."""
        return self._addend(self.through, self.a if columns is None else self.a[:, :, columns])

    def _addend(self, low: Tensor, factor: Tensor) -> Addend | None:
        from torch_moe_ops.backends.triton_engine.grouped import Addend

        return None if self.factors.merged else Addend(low, factor)

    def by_slot(self, rows: Tensor, index: Tensor | None) -> RanksBySlot | None:
        """`down` and `forward_addend` for kernels that take them by slot."""
        if self.factors.merged:
            return None
        p, ranks = self.p, self.a.shape[1]
        chunks = ceil_div(ranks, RANK_CHUNK)
        low = self.a.new_empty((p.slots.order.shape[0], chunks, 2, RANK_CHUNK))
        self.engine.low_rows(rows, index, self.a, p.slots, True, self.owners, 0, p.sizes.num_experts, low, RANK_CHUNK)
        return RanksBySlot(low, F.pad(self.b, (0, -ranks % 8)) if ranks % 8 else self.b)

    def learn(
        self, rows: Tensor, rows_of_tokens: bool, grad: Tensor, grad_of_tokens: bool, weights: Tensor | None
    ) -> None:
        """The gradients of A and B that are wanted and not there: through.T rows and grad.T low.

        Args:
            rows: what `down` multiplied, bfloat16; grad: what `back` did; of tokens or of pairs.
            weights: float32 [slots], multiply both; None: nothing does.
        """
        (a, b), found = self.factors.wants, list(self.factors.found or (None, None))
        sums, slots, given = self.engine.outer_sums, self.p.slots, self.factors.given
        if a and found[0] is None:
            found[0] = sums(rows, rows_of_tokens, self.through, slots, weights, True, given[0].dtype)
        if b and found[1] is None:
            found[1] = sums(grad, grad_of_tokens, self.low, slots, weights, False, given[1].dtype)
        self.factors.found = (found[0], found[1])

    def down_and_learn(self, rows: Tensor, weights: Tensor | None) -> None:
        """`down` of rows of pairs, and the gradient of A, where it is wanted, from the same read of them."""
        from torch_moe_ops.backends.triton_engine import rank_sums

        if not (self.factors.wants[0] and rank_sums.serves(rows, self.a.shape[1])):
            return self.down(rows, None)
        p, dtype = self.p, self.factors.given[0].dtype
        given = (self.low, self.through, p.slots, weights, True, dtype)
        self.factors.found = (rank_sums.low_and_sums(rows, self.a, True, self.owners, *given), None)
        return None

    def back_and_learn(self, grad: Tensor) -> None:
        """`back` of rows of pairs, and the gradient of B, where it is wanted, from the same read of them."""
        from torch_moe_ops.backends.triton_engine import rank_sums

        if not (self.factors.wants[1] and rank_sums.serves(grad, self.a.shape[1])):
            return self.back(grad, None, 0, self.p.sizes.num_experts)
        p, dtype = self.p, self.factors.given[1].dtype
        given = (self.through, self.low, p.slots, None, False, dtype)
        self.factors.found = (None, rank_sums.low_and_sums(grad, self.b, False, self.owners, *given))
        return None
