"""Expert parallelism on two GPUs and on four, over every transport: correct, capturable, the same bits at every replay."""

from __future__ import annotations

import json
import os
import re
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
SIZES = [
    pytest.param(n, marks=pytest.mark.skipif(torch.cuda.device_count() < n, reason="too few GPUs")) for n in (2, 4)
]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", SIZES)
def test_gpus(size: int, transport: str, tmp_path: Path) -> None:
    out = tmp_path / "outcomes.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    command += [str(PROGRAMS / "ep_gpus.py"), transport, str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    checks = json.loads(out.read_text())
    names = ("agreement", "edges", "transports", "large", "groups", "graphs", "compiled")
    assert all(checks[name]["passed"] for name in names)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", SIZES)
def test_cases_of_the_layer(size: int, transport: str, tmp_path: Path) -> None:
    """What processes on CPUs show over gloo."""
    for name, outcomes in run_ranks(size, [f.__name__ for f in ON_GPUS], tmp_path, transport).items():
        for rank, outcome in enumerate(outcomes):
            assert outcome == "passed", f"{name}, rank {rank}:\n{outcome}"


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
@pytest.mark.parametrize("tokens", [8, 512])  # rows go as words, and with flags
@pytest.mark.parametrize("size", SIZES)
def test_a_rank_that_stops(size: int, tokens: int, phase: str, tmp_path: Path) -> None:
    """The others end within the group's bound, and say for whom they have waited, and in what."""
    command = [sys.executable, str(PROGRAMS / "ep_stopped.py")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(tmp_path / "store"), phase, str(tokens)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    last = size - 1
    try:
        every = [process.communicate(timeout=200)[0] for process in ranks[:last]]
    finally:
        for process in ranks:
            process.kill()
    for rank, said in enumerate(every):
        assert f"s for rank {last} in {phase}" in said and f"rank {rank} has waited" in said, said
        assert re.search(rf"ep_{phase}: block: .* Assertion `rank {last} came in time` failed", said), said
        assert "ended: after " in said, said
        assert 24 < float(said.split("ended: after ")[1].split()[0]) < 120, said
