"""The folders of csrc/cuda/sm90: named in docs/hopper.md, files that have no namesake, and are where texts say."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "csrc" / "cuda" / "sm90"
TEXTS = {".cu", ".cuh", ".cpp", ".h", ".py", ".sh", ".md"}
SOURCE = re.compile(r"(?<![\w/])csrc/[\w/]+\.(?:cuh?|cpp|h)\b")


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


def test_texts_name_sources_that_exist() -> None:
    """Comments, pages and scripts, which nothing else holds to where files are moved."""
    folders = ("csrc", "torch_moe_ops", "tests", "docs", "scripts", "benchmarks", "examples")
    texts = [p for folder in folders for p in (ROOT / folder).rglob("*") if p.suffix in TEXTS]
    texts += [p for p in ROOT.iterdir() if p.suffix in TEXTS or p.name == "Makefile"]
    named = {(p, name) for p in texts for name in SOURCE.findall(p.read_text("utf-8"))}
    assert len(named) > 10
    assert [f"{p.relative_to(ROOT)}: {name}" for p, name in sorted(named) if not (ROOT / name).exists()] == []
