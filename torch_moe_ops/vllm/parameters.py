"""What a format keeps in a layer while vLLM's weight loader fills it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerSizes:
    """One rank's share of a layer, as vLLM shards it.

    experts: on this rank. intermediate: this rank's part of it. halves: 2 where w13 holds gate and up rows, else 1.
    dtype: of the model's unquantized parameters.
    """

    experts: int
    hidden: int
    intermediate: int
    halves: int
    has_bias: bool
    dtype: torch.dtype

    def matrices(self) -> Iterator[tuple[str, int, int, tuple[int, ...]]]:
        """(name, rows, K, shape of a scale for each whole matrix or half) of both weights."""
        yield "w13", self.halves * self.intermediate, self.hidden, (self.experts, self.halves)
        yield "w2", self.hidden, self.intermediate, (self.experts,)


@dataclass(frozen=True)
class Parameter:
    """A tensor that the weight loader fills.

    sharing: what shares a scale, in the loader's words, which decide how it shards one: "tensor", "channel", "group",
        "block"; "" for codes and biases.
    optional: a checkpoint may lack it; it is then NaN throughout.
    dummy: where vLLM fills layers with random numbers instead of loading them, this one gets this value.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    sharing: str = ""
    optional: bool = False
    dummy: float | None = None

    def empty(self, device: torch.device | str | None = None) -> Tensor:
        """Zeros, which pad what a rank of a divided layer has more than the file; NaN where optional."""
        return torch.full(self.shape, math.nan if self.optional else 0, dtype=self.dtype, device=device)


def loaded(values: Tensor) -> Tensor | None:
    """The values of an optional parameter, None where the checkpoint had none of them."""
    if values.device.type == "meta":
        return values
    return None if bool(values.isnan().all()) else values
