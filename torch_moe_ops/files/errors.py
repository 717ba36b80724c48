"""The one exception of the loader, and how values of files appear in its text."""

from __future__ import annotations

from typing import Any

_LENGTH = 120
PATH_LENGTH = 4096  # the most that paths have


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the text names the file, the tensor and, where there is one, the expert."""


def short(value: Any, most: int = _LENGTH) -> str:
    """A value of a file for a message, `most` characters at most: printable text as it is, else its repr."""
    text = value if isinstance(value, str) else repr(value)
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= most else text[: most - 3] + "..."
