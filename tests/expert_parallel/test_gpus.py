"""Expert parallelism on two GPUs, over every transport: correct, capturable, the same bits at every replay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ep_cases import ON_GPUS
from paths import ROOT, TESTS
from ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
TRANSPORTS = ("nccl", "p2p")
PROGRAMS = TESTS / "programs"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_gpus(transport: str, tmp_path: Path) -> None:
    out = tmp_path / "outcomes.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(PROGRAMS / "ep_gpus.py"), transport, str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    checks = json.loads(out.read_text())
    names = ("agreement", "edges", "transports", "large", "groups", "graphs", "compiled")
    assert all(checks[name]["passed"] for name in names)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_cases_of_the_layer(transport: str, tmp_path: Path) -> None:
    """What processes on CPUs show over gloo."""
    for name, outcomes in run_ranks(2, [f.__name__ for f in ON_GPUS], tmp_path, transport).items():
        for rank, outcome in enumerate(outcomes):
            assert outcome == "passed", f"{name}, rank {rank}:\n{outcome}"


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_a_rank_that_stops(phase: str, tmp_path: Path) -> None:
    """The other one ends within the group's bound, and says for whom it has waited, and in what."""
    command = [sys.executable, str(PROGRAMS / "ep_stopped.py")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), phase],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said, _ = ranks[0].communicate(timeout=200)
    finally:
        for process in ranks:
            process.kill()
    assert f"s for rank 1 in {phase}" in said and "rank 0 has waited" in said, said
    assert f"ep_{phase}: block: [0,0,0], thread: [1,0,0] Assertion" in said, said
    assert "ended: after " in said, said
    assert 24 < float(said.split("ended: after ")[1].split()[0]) < 120, said
