"""The folders of csrc/cuda/sm90: named in docs/hopper.md, and files that have no namesake."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "csrc" / "cuda" / "sm90"


def test_docs_name_every_folder() -> None:
    section = (ROOT / "docs" / "hopper.md").read_text().split("## The folders")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == {p.name for p in KERNELS.iterdir()}


def test_no_two_sources_have_one_name() -> None:
    """Objects and logs of `make cuda-compile` are named after sources, and texts name a file without its folder."""
    names = Counter(p.name for p in (ROOT / "csrc" / "cuda").rglob("*") if p.is_file())
    assert [name for name, count in names.items() if count > 1 and name.endswith(".cu")] == []
    names = Counter(p.name for p in KERNELS.rglob("*") if p.is_file())
    assert [name for name, count in names.items() if count > 1] == []
    assert [p for p in KERNELS.iterdir() if p.is_file()] == []
