"""Python finds an extension's init function where its object exports it: all else is hidden (setup.py)."""

from __future__ import annotations

import re

import pytest
from paths import ROOT

SOURCES = {
    name: path
    for path in sorted((ROOT / "csrc").rglob("*.cpp"))
    for name in re.findall(r"\bPyInit_(\w+)\(", path.read_text("utf-8"))
}


def test_both_extensions_have_one() -> None:
    assert sorted(SOURCES) == ["_C", "_C_cuda"]
    assert '"-fvisibility=hidden"' in (ROOT / "setup.py").read_text("utf-8")


@pytest.mark.parametrize("name", SOURCES)
def test_init_functions_are_exported(name: str) -> None:
    """Without Python's macro the function is hidden, and an import fails that linked well."""
    assert re.search(rf"^PyMODINIT_FUNC PyInit_{name}\(", SOURCES[name].read_text("utf-8"), re.MULTILINE)
