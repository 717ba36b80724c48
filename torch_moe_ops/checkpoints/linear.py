"""One projection of one expert: its tensors, read on demand, with errors that name tensor and expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.files.errors import CheckpointError, short
from torch_moe_ops.files.header import TensorEntry
from torch_moe_ops.files.tensor_reader import TensorReader

_WEIGHT_PARTS = ("weight", "weight_packed", "blocks", "qweight")


class Linear:
    """A weight matrix [rows, K storage] of one expert and what belongs to it.

    Args:
        reader: open files.
        names: part ("weight", "weight_scale", ...) -> tensor name.
        projection: "gate", "up", "down" or "gate_up".
        expert: which expert.
        num_experts: 0 where the tensors belong to this expert alone; else their first dimension, of
            which only row `expert` is read (tensors without that dimension are shared by all experts).
        transposed: matrices are stored [K storage, rows].
    """

    def __init__(
        self,
        reader: TensorReader[Any],
        names: Mapping[str, str],
        projection: str,
        expert: int,
        num_experts: int = 0,
        transposed: bool = False,
    ) -> None:
        self._reader = reader
        self.names = names
        self.projection = projection
        self.expert = expert
        self._num_experts = num_experts
        self._transposed = transposed

    def __contains__(self, part: str) -> bool:
        return part in self.names

    def entry(self, part: str) -> TensorEntry:
        """Header entry of a part; CheckpointError where the part is missing."""
        if part not in self.names:
            known = next(iter(self.names.values()), "none")
            text = f"{self._reader.index.path}: {self.where}: tensor {part} is missing"
            raise CheckpointError(f"{text} (beside {known})")
        return self._reader.index.entries[self.names[part]]

    @property
    def weight_part(self) -> str:
        """The part that holds the codes."""
        return next((part for part in _WEIGHT_PARTS if part in self.names), "weight")

    def is_shared(self, part: str) -> bool:
        """True where one value serves all experts of the layer."""
        shape = self.entry(part).shape
        return bool(self._num_experts) and shape in ((), (1,))

    @property
    def where(self) -> str:
        """Which matrix this is, for messages."""
        return f"expert {self.expert}, {self.projection}"

    def fail(self, part: str, requirement: str, got: Any) -> CheckpointError:
        """The error for one tensor of this projection; to be raised by the caller."""
        name = self.names.get(part, part)
        if isinstance(got, Tensor):
            got = got.item()
        text = short(got if isinstance(got, str) else repr(got))
        return CheckpointError(f"{self.entry(part).file}: tensor {name} ({self.where}) must {requirement}, got {text}")

    def require_dtype(self, part: str, *dtypes: str) -> None:
        """`dtypes` in the words of the file format, such as "F8_E4M3"."""
        got = self.entry(part).dtype
        if got not in dtypes:
            raise self.fail(part, f"have dtype {' or '.join(dtypes)}", got)

    def shape(self, part: str) -> tuple[int, ...]:
        """Shape of this expert's part as the file stores it, without reading it."""
        shape = self.entry(part).shape
        return shape if not self._num_experts or self.is_shared(part) else shape[1:]

    def tensor(self, part: str, *dtypes: str) -> Tensor:
        """The part as [rows, K ...], in its stored dtype, which must be one of `dtypes`."""
        entry = self.entry(part)
        self.require_dtype(part, *dtypes)
        if not self._num_experts or self.is_shared(part):
            value = self._reader.read(self.names[part])
        elif not entry.shape or entry.shape[0] != self._num_experts:
            raise self.fail(part, f"have {self._num_experts} experts in its first dimension", entry.shape)
        else:
            value = self._reader.read(self.names[part], self.expert)
        return value.t() if self._transposed and value.ndim == 2 else value

    def matrix(self, part: str, *dtypes: str) -> Tensor:
        """`tensor` with exactly two dimensions."""
        value = self.tensor(part, *dtypes)
        if value.ndim != 2:
            raise self.fail(part, "have 2 dimensions per expert", tuple(value.shape))
        return value

    def shaped(self, part: str, shape: tuple[int, ...], *dtypes: str) -> Tensor:
        """`tensor` with exactly this shape."""
        value = self.tensor(part, *dtypes)
        if tuple(value.shape) != shape:
            raise self.fail(part, f"have shape {shape}", tuple(value.shape))
        return value

    def scalar(self, part: str, *dtypes: str) -> Tensor:
        """A part of one element as float32 []."""
        value = self.tensor(part, *(dtypes or ("F32", "BF16", "F16")))
        if value.numel() != 1:
            raise self.fail(part, "have one element", tuple(value.shape))
        return value.reshape(()).to(torch.float32)
