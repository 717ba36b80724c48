"""Expert parallelism over NCCL on two GPUs: correct, capturable, the same bits at every replay. See ep_gpus.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from paths import ROOT, TESTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def test_two_gpus(tmp_path: Path) -> None:
    out = tmp_path / "outcomes.json"
    program = str(TESTS / "programs" / "ep_gpus.py")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        program,
        str(out),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    said = json.loads(out.read_text())
    assert all(said[check]["passed"] for check in ("agreement", "edges", "graphs", "compiled"))
