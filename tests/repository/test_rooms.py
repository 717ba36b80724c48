"""The rooms of the package: imports go down, nothing imports in a circle, and docs/design.md shows it as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from modules_by_path import ROOT, load

rooms = load("scripts/rooms.py")

MOST_LEVELS = 7


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return rooms.imports()


def test_no_files_import_in_a_circle(graph: dict[str, set[str]]) -> None:
    assert rooms.circles(graph) == []


def test_rooms_import_from_lower_levels_only(graph: dict[str, set[str]]) -> None:
    between = rooms.between_rooms(graph)
    assert rooms.circles(between) == []
    level = rooms.levels(between)
    assert all(level[target] < level[name] for name, targets in between.items() for target in targets)
    assert max(level.values()) <= MOST_LEVELS, level


def test_every_folder_says_what_it_holds() -> None:
    for folder in {path.parent for path in (ROOT / "torch_moe_ops").rglob("*.py")}:
        name = str(folder.relative_to(ROOT / "torch_moe_ops"))
        assert (folder / "__init__.py").exists(), f"{folder} has no __init__.py"
        assert rooms.sentence(name), f"{folder}/__init__.py has no docstring"


def test_the_picture_is_the_one_of_the_imports() -> None:
    text = rooms.PICTURE.read_text()
    assert rooms.with_picture(text, rooms.picture()) == text, "python scripts/rooms.py --write"


def _plant(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / "torch_moe_ops" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


PLANTED = {
    "__init__.py": "",
    "low/__init__.py": "",
    "low/a.py": "",
    "high/__init__.py": "",
    "high/b.py": "from torch_moe_ops.low import a\n",
}


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("low/a.py", "from torch_moe_ops.high.b import x\n"),
        ("low/a.py", "def f():\n    import torch_moe_ops.high.b\n"),
        ("low/a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch_moe_ops.high import b\n"),
    ],
)
def test_a_planted_circle_is_found(tmp_path: Path, file: str, text: str) -> None:
    _plant(tmp_path, PLANTED)
    assert rooms.circles(rooms.imports(tmp_path)) == []
    _plant(tmp_path, {file: text})
    assert rooms.circles(rooms.imports(tmp_path)) == [["torch_moe_ops.high.b", "torch_moe_ops.low.a"]]


def test_a_planted_arrow_upwards_is_found(tmp_path: Path) -> None:
    """No circle of files, but one of rooms."""
    _plant(tmp_path, PLANTED | {"low/c.py": "from torch_moe_ops.high import d\n", "high/d.py": ""})
    graph = rooms.imports(tmp_path)
    assert rooms.circles(graph) == []
    assert rooms.circles(rooms.between_rooms(graph)) == [["high", "low"]]


def test_levels_of_planted_rooms(tmp_path: Path) -> None:
    _plant(tmp_path, PLANTED | {"top.py": "from torch_moe_ops.high import b\n"})
    level = rooms.levels(rooms.between_rooms(rooms.imports(tmp_path)))
    assert (level["low"], level["high"], level["top"]) == (1, 2, 3)
