"""Pages that are made by scripts are up to date, and every op and argument has a text."""

from __future__ import annotations

import re

import pytest
from modules_by_path import ROOT, load

import torch_moe_ops as moe
from torch_moe_ops.core.schemas import SCHEMAS


def test_every_op_and_argument_has_a_text() -> None:
    docs = load("scripts/op_docs.py")
    assert docs.missing() == []
    for name in SCHEMAS:
        assert f"## `{name}`" in docs.page()


def test_the_page_of_ops_is_up_to_date() -> None:
    same = (ROOT / "docs" / "ops.md").read_text() == load("scripts/op_docs.py").page()
    assert same, "run: python scripts/op_docs.py --write"


def test_the_support_table_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # the table speaks of devices, not of an interpreter
    readme = (ROOT / "README.md").read_text()
    script = load("scripts/support_table.py")
    same = {
        "README.md": readme == script.readme_with_table(readme),
        script.PAGE.name: script.PAGE.read_text() == script.page(),
        script.FILE.name: script.FILE.read_text() == script.current().distilled(),
    }
    assert all(same.values()), f"run: python scripts/support_table.py --write (up to date: {same})"


def test_the_readme_names_what_exists() -> None:
    readme = (ROOT / "README.md").read_text()
    for name in set(re.findall(r"\bmoe\.(\w+)", readme)):
        assert hasattr(moe, name), name
    for path in re.findall(r"\]\((?!http)([^)#]+)\)", readme):
        assert (ROOT / path).exists(), path


def test_public_names_have_docstrings() -> None:
    for name in moe.__all__:
        if not name.startswith("__"):
            assert getattr(moe, name).__doc__, name
