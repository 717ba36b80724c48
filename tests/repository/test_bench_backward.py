"""benchmarks/bench_backward.py: its ways compute the same gradients, and its rows say what they should."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from paths import ROOT


def test_ways_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    bench = importlib.import_module("bench_backward")
    out = tmp_path / "rows.json"
    options = ["--device", "cpu", "--shapes", "tiny", "--tokens", "33,1", "--seconds", "0", "--out", str(out)]
    assert bench.main(options) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["way"], row["tokens"]) for row in rows] == [
        (way, m) for way in ("bf16", "dequantize", "packed", "lora", "grouped_linear") for m in (33, 1)
    ]
    assert all(error < 2e-2 for row in rows for error in row["error"])
    assert all(row["step_ms"] > 0 and row["forward_ms"] > 0 for row in rows)
    assert any(error > 0 for row in rows for error in row["error"])  # bf16 products are not ours


def test_some_of_the_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    bench = importlib.import_module("bench_backward")
    out = tmp_path / "rows.json"
    options = ["--device", "cpu", "--shapes", "tiny", "--tokens", "3", "--seconds", "0", "--ways", "lora,packed"]
    assert bench.main([*options, "--out", str(out)]) == 0
    assert [row["way"] for row in json.loads(out.read_text())["rows"]] == ["packed", "lora"]
