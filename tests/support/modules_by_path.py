"""Programs of the repository that are no part of the package, as modules."""

from __future__ import annotations

import importlib.util
from types import ModuleType

from paths import ROOT


def load(path: str) -> ModuleType:
    """A file, by its path from the root of the repository."""
    file = ROOT / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
