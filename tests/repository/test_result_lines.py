"""What result files of benchmarks begin with."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from paths import ROOT

BENCHMARKS = ROOT / "benchmarks"


def test_files_are_named_without_their_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import result_lines

    monkeypatch.setattr(sys, "argv", ["bench.py", "--out", str(tmp_path / "a.jsonl"), "--ms", "1,8", "b/c.jsonl"])
    assert result_lines.arguments() == ["--out", "a.jsonl", "--ms", "1,8", "b/c.jsonl"]
    for _ in range(2):
        result_lines.write([{"event": "env"}, {"us": 1.5}], tmp_path / "a.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert lines == [{"event": "env"}, {"us": 1.5}] * 2
    del sys.modules["result_lines"]


def test_no_benchmark_has_an_expression_of_its_own_for_that() -> None:
    own = [path.name for path in BENCHMARKS.glob("*.py") if re.search(r"is_absolute\(\)|isabs\(", path.read_text())]
    assert own == ["result_lines.py"]


def test_no_result_names_a_folder_of_a_machine() -> None:
    """Results are read by others: `argv` of every run has names of files alone."""
    for path in (BENCHMARKS / "results").glob("*.jsonl"):
        for line in path.read_text("utf-8").splitlines():
            words = json.loads(line).get("argv", []) if '"argv"' in line else []
            assert not [word for word in words if word.startswith("/")], path.name
