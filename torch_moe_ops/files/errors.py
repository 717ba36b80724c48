"""The one exception of the loader, and how values of files appear in its text."""

from __future__ import annotations

from typing import Any

_LENGTH = 120


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the text names the file, the tensor and, where there is one, the expert."""


def short(value: Any) -> str:
    """A value of a file for a message: printable text as it is, anything else by its repr; at most 120 characters."""
    text = value if isinstance(value, str) else repr(value)
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= _LENGTH else text[: _LENGTH - 3] + "..."
