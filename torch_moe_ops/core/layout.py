"""Layouts as data: which shapes and dtypes the tensors of a prepared layer have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torch_moe_ops.core.schemes import Scheme


@dataclass(frozen=True)
class Sizes:
    """The logical sizes that decide the shape of every weight tensor of a layer."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    is_gated: bool
    weight_dtype: torch.dtype


# The allowed shapes and the allowed dtypes of one argument.
Spec = tuple[tuple[tuple[int, ...], ...], tuple[torch.dtype, ...]]


@dataclass(frozen=True)
class Layout:
    """Where the codes and block scales of a prepared layer lie.

    specs: sizes -> {argument: (shapes, dtypes)} for w13, w2 and their scales; one of each must match.
        Zero points are shaped like the scales.
    intermediate_size: shape of w2 -> intermediate size, padding of the layout included.
    stored: scheme -> dtype of the codes where it is not the scheme's own.
    pads_hidden: tensors are in tiles, whose numbers are in their shapes. So tensors of two hidden sizes may have the
        same shapes, and who knows the layer's has to check it; w13's scales and w2's have one form.
    """

    name: str
    specs: Callable[[Scheme, Sizes], dict[str, Spec]]
    intermediate_size: Callable[[Scheme, tuple[int, ...]], int]
    stored: Mapping[str, torch.dtype] = field(default_factory=dict)
    pads_hidden: bool = False

    def weight_dtypes(self, scheme: Scheme) -> tuple[torch.dtype, ...]:
        """Dtypes of w13 and w2."""
        own = self.stored.get(scheme.name)
        return scheme.weight_dtypes if own is None else (own,)


@dataclass(frozen=True)
class BiasLayout:
    """How a layout orders biases. `name` is "w13_bias" or "w2_bias"; the dtype is float32.

    arrange: (name, bias [E, rows], halves) -> as the layout has it. undo: its inverse, on padded rows.
    The halves of w13_bias are padded already; rows of w2_bias may be added.
    """

    arrange: Callable[[str, Tensor, int], Tensor]
    undo: Callable[[str, Tensor, int], Tensor]
