"""benchmarks/bench_transformers_model.py at small sizes on a CPU: every line of its result is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from modules_by_path import ROOT

pytest.importorskip("transformers", minversion="5.17", reason="needs transformers >= 5.17")


@pytest.mark.parametrize(
    ("shape", "options"), [("qwen3_30b_a3b", []), ("gpt_oss_20b", []), ("qwen3_30b_a3b", ["--own-router"])]
)
def test_every_number_is_measured(shape: str, options: list[str], tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    given = ["--tiny", "--shape", shape, "--batches", "1,2", "--compile", "", "--prefill", "16", "--cache", "128"]
    program = [sys.executable, ROOT / "benchmarks" / "bench_transformers_model.py", *given, "--out", out, *options]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    subprocess.run(program, check=True, env=environment, capture_output=True, cwd=tmp_path)
    result = json.loads(out.read_text())
    assert result["shape"] == shape and result["routers"] == ("transformers" if options else "moeq::route")
    assert result["parameters"] > 200_000 and str(tmp_path) not in out.read_text()
    measured = [(line["what"], line.get("batch")) for line in result["lines"]]
    assert measured == [(what, batch) for batch in (1, 2) for what in ("decode", "moe", "experts")] + [
        ("prefill", None)
    ]
    assert all(line["ms"] >= line["ms_min"] > 0 for line in result["lines"])
