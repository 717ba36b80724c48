"""`make lint` and the hooks of pre-commit are one list of tools, in pinned versions."""

from __future__ import annotations

import re

from modules_by_path import ROOT


def _lint() -> str:
    """The recipe of `make lint`."""
    found = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    assert found is not None
    return found[1]


def test_hooks_run_what_lint_runs() -> None:
    hooks = re.findall(r"^ +entry: \.venv/bin/([\w-]+)", (ROOT / ".pre-commit-config.yaml").read_text(), re.M)
    assert set(hooks) == set(re.findall(r"\$\(VENV\)/bin/([\w-]+)", _lint()))


def test_its_tools_are_pinned() -> None:
    found = re.search(r"^lint = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.M)
    assert found is not None
    pinned = set(re.findall(r'"([\w-]+)==[\d.]+"', found[1]))
    assert pinned == set(re.findall(r"\$\(VENV\)/bin/([\w-]+)", _lint()))
