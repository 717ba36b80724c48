"""Modules of `benchmarks`, which import each other by their names alone, for a test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from paths import ROOT

FOLDER = ROOT / "benchmarks"


@contextmanager
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """They can be imported inside, and are forgotten behind: other tests may import them anew, with other settings."""
    before = set(sys.modules)
    for folder in (FOLDER / "peers", FOLDER):
        monkeypatch.syspath_prepend(str(folder))
    try:
        yield
    finally:
        for name in set(sys.modules) - before:
            if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(FOLDER)):
                del sys.modules[name]
