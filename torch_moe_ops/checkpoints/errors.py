"""The one exception of the loader."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the text names the file, the tensor and, where there is one, the expert."""
