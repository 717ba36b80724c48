"""What a transport is asked to do, and what it gives: plain values and tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Ends errors that come before anything is exchanged.
ALONE = " (on this rank, before anything was exchanged: the other ranks of the group wait)"


class Exchange(NamedTuple):
    """One group of ranks and the sizes that all of them agree upon.

    group: name of a process group. max_tokens: rows that a rank gives at most. capacity: rows that a rank sends to one
    other rank at most, 0: all rows go to all ranks. slots: experts on each rank, in the order of their ids.
    """

    group: str
    world_size: int
    max_tokens: int
    slots: tuple[int, ...] = ()
    capacity: int = 0

    @property
    def rows_of_a_rank(self) -> int:
        """Rows that come from one rank, those that stand for no token included."""
        return self.capacity or self.max_tokens

    @property
    def rows(self) -> int:
        """Rows that come from all ranks."""
        return self.world_size * self.rows_of_a_rank


class Rows(NamedTuple):
    """Tokens and what belongs to each: hidden_states [T, ...], scale [T, ...] or None, topk_ids and -weights [T, k]."""

    hidden_states: Tensor
    scale: Tensor | None
    topk_ids: Tensor
    topk_weights: Tensor

    def present(self) -> list[Tensor]:
        return [t for t in self if t is not None]

    def like(self, tensors: list[Tensor]) -> Rows:
        """`tensors`, made of `present()`, under their names again."""
        left = iter(tensors)
        return Rows(*(None if t is None else next(left) for t in self))  # type: ignore[arg-type]


class Combine(NamedTuple):
    """How partial rows become results.

    positions: int32 [T, world_size], the row of a rank's part in which a token's partial result lies, -1: nowhere;
    [0, world_size] where token t is row t of every part. tp_group: ranks that hold other parts of the same experts and
    the same tokens, "": none. wire_dtype: None: partial rows travel as they are; else as partial_rows.py encodes them.
    """

    positions: Tensor
    num_tokens: int
    out_dtype: torch.dtype
    tp_group: str = ""
    tp_size: int = 1
    wire_dtype: torch.dtype | None = None
