"""benchmarks/bench_lora.py: its rows say what they should."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from paths import ROOT


@pytest.mark.parametrize("few", [False, True])
def test_rows(few: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    bench = importlib.import_module("bench_lora")
    steps, real = [], bench.median_ms
    monkeypatch.setattr(bench, "median_ms", lambda step, device: steps.append(step) or real(step, device, 1))
    out = tmp_path / "rows.jsonl"
    options = ["--device", "cpu", "--shapes", "tiny", "--tokens", "3,1", "--out", str(out)]
    assert bench.main(options + ["--few"] * few) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row.pop("layer"), row.pop("tokens")) for row in rows] == [("tiny", 3), ("tiny", 1)]
    kinds = ("forward",) if few else ("forward", "step")
    for row in rows:
        assert list(row) == [f"{way}_{kind}_ms" for way in ("plain", "lora") for kind in kinds]
        assert all(value > 0 for value in row.values())
    if not few:  # hidden states and routing weights; with adapters the four factors too
        assert [len(step() or ()) for step in steps] == [0, 2, 0, 6] * 2
