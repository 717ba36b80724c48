"""Read tensors, or one expert's slice of them, from the files of a checkpoint."""

from __future__ import annotations

import dataclasses
import math
from types import TracebackType
from typing import BinaryIO, Generic, TypeVar

import torch
from torch import Tensor

from torch_moe_ops.files.errors import CheckpointError
from torch_moe_ops.files.header import TORCH_DTYPES, TensorEntry, digest_of, header_text
from torch_moe_ops.files.index import FileIndex
from torch_moe_ops.files.reading import open_regular, unreadable

Index = TypeVar("Index", bound=FileIndex)


class TensorReader(Generic[Index]):
    """Keeps the files open between reads: a layer has thousands of small tensors in few files.

    Plain reads instead of a memory map: a file that shrinks meanwhile is an error and not a SIGBUS, and the pages
    of the file do not count as memory of the process. A file whose header is not the indexed one any more is an error.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        self._files: dict[str, BinaryIO] = {}

    def __enter__(self) -> TensorReader[Index]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._files:
            self._files.popitem()[1].close()

    def with_shapes(self, shapes: dict[str, tuple[int, ...]]) -> TensorReader[Index]:
        """A reader of the same open files for which tensors have other shapes of as many elements."""
        entries = {name: self.index.entries[name]._replace(shape=shape) for name, shape in shapes.items()}
        other = TensorReader(dataclasses.replace(self.index, entries=self.index.entries | entries))
        other._files = self._files  # which this one closes
        return other

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
            stream = self._files.get(entry.file) or self._open(entry.file)
            stream.seek(start)
            got = stream.readinto(buffer)  # type: ignore[attr-defined]
        except OSError as error:
            raise unreadable(entry.file, error, f"tensor {name}: ") from error
        if got != nbytes:
            raise CheckpointError(f"{entry.file}: is truncated: tensor {name} needs {nbytes} bytes, got {got}")
        return buffer

    def _open(self, file: str) -> BinaryIO:
        stream = self._files[file] = open_regular(file)
        text, _ = header_text(stream, file)
        if digest_of(text) != self.index.digests[file]:
            self.index.forget()
            raise CheckpointError(f"{file}: its header has changed since it was indexed: load again")
        return stream
