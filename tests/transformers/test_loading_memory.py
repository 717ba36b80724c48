"""Peak memory of from_pretrained: at most 1.2 times what the loaded model holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from modules_by_path import ROOT

pytest.importorskip("transformers", minversion="5.17", reason="needs transformers >= 5.17")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux: /proc/self/status has the memory")
@pytest.mark.parametrize("format_name", ["ModelOpt NVFP4", "ModelOpt FP8", "compressed-tensors INT4", "GPTQ"])
def test_peak_memory_while_loading(format_name: str, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [sys.executable, ROOT / "benchmarks" / "bench_loading.py", "--formats", format_name, "--layers", "12"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run([*command, "--out", out], check=True, capture_output=True, env=environment, cwd=tmp_path)
    (line,) = json.loads(out.read_text())["lines"]
    assert 1.0 <= line["peak_over_result"] <= 1.2, line
