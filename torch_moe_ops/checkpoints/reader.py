"""Read tensors, or one expert's slice of them, from the files of a checkpoint."""

from __future__ import annotations

import math
from types import TracebackType
from typing import BinaryIO

import torch
from torch import Tensor

from torch_moe_ops.checkpoints.errors import CheckpointError
from torch_moe_ops.checkpoints.header import TORCH_DTYPES, TensorEntry
from torch_moe_ops.checkpoints.index import CheckpointIndex


class TensorReader:
    """Keeps the files open between reads: a layer has thousands of small tensors in few files.

    Plain reads instead of a memory map: a file that shrinks meanwhile is an error and not a SIGBUS, and the pages
    of the file do not count as memory of the process.
    """

    def __init__(self, index: CheckpointIndex) -> None:
        self.index = index
        self._files: dict[str, BinaryIO] = {}

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._files:
            self._files.popitem()[1].close()

    def read(self, name: str, row: int | None = None) -> Tensor:
        """The tensor, or `row` of its first dimension, in its stored dtype on the CPU."""
        entry = self.index.entries[name]
        dtype = TORCH_DTYPES.get(entry.dtype)
        if dtype is None:
            raise CheckpointError(
                f"{entry.file}: tensor {name} must have a dtype that torch can hold, got {entry.dtype}"
            )
        start, shape, nbytes = entry.start, entry.shape, entry.nbytes
        if row is not None:
            shape, nbytes = shape[1:], nbytes // shape[0]
            start += row * nbytes
        if math.prod(shape) == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._bytes(name, entry, start, nbytes), dtype=dtype).reshape(shape)

    def _bytes(self, name: str, entry: TensorEntry, start: int, nbytes: int) -> bytearray:
        buffer = bytearray(nbytes)
        try:
            if entry.file not in self._files:
                self._files[entry.file] = open(entry.file, "rb")  # noqa: SIM115 - closed by __exit__
            stream = self._files[entry.file]
            stream.seek(start)
            got = stream.readinto(buffer)  # type: ignore[attr-defined]
        except OSError as error:
            raise CheckpointError(f"{entry.file}: tensor {name}: cannot be read: {error.strerror or error}") from error
        if got != nbytes:
            raise CheckpointError(f"{entry.file}: is truncated: tensor {name} needs {nbytes} bytes, got {got}")
        return buffer
