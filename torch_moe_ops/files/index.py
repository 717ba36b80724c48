"""What a set of safetensors files holds, by the names of its tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch_moe_ops.files.header import TensorEntry


@dataclass(frozen=True, kw_only=True)
class FileIndex:
    """Tensors by name, and how to know the files again.

    Args:
        path: folder or file as it was given.
        entries: every tensor by its full name.
        digests: of each file's header, by which a reader knows that it opened the file that was indexed.
    """

    path: str
    entries: dict[str, TensorEntry]
    digests: dict[str, bytes]

    def forget(self) -> None:
        """The files are others now: whoever keeps this index must drop it."""
