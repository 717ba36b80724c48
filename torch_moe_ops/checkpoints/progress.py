"""A progress bar on stderr for loads that take a while, where tqdm is installed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar

_DELAY_SECONDS = 2.0
_T = TypeVar("_T")


def track(items: Sequence[_T], description: str) -> Iterable[_T]:
    """The items; a bar appears once they have taken more than two seconds."""
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    return tqdm(items, desc=description, delay=_DELAY_SECONDS, file=sys.stderr, leave=False)
