"""Whether a backward pass will follow a call: then its forward pass should hold no more than that will."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_OF_THREAD = threading.local()


@contextmanager
def for_backward() -> Iterator[None]:
    """In which a forward pass runs whose arguments are saved for a backward pass."""
    before = is_for_backward()
    _OF_THREAD.on = True
    try:
        yield
    finally:
        _OF_THREAD.on = before


def is_for_backward() -> bool:
    return getattr(_OF_THREAD, "on", False)
