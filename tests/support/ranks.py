"""Groups of processes that run cases of expert parallelism: tests/programs/ep_ranks.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from paths import ROOT, TESTS

SECONDS = 500


def run_ranks(size: int, names: list[str], folder: Path, transport: str = "cpu") -> dict[str, list[str]]:
    """Case -> what became of it on each rank."""
    program = str(TESTS / "programs" / "ep_ranks.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    outs = [folder / f"{rank}.json" for rank in range(size)]
    common = [str(folder / "store")]
    ranks = [
        subprocess.Popen(
            [sys.executable, program, str(rank), str(size), *common, str(out), transport, *names], env=environment
        )
        for rank, out in enumerate(outs)
    ]
    try:
        for process in ranks:
            process.wait(SECONDS)
    finally:
        for process in ranks:
            process.kill()
    said = [json.loads(out.read_text()) if out.exists() else {} for out in outs]
    return {name: [one.get(name, "no outcome") for one in said] for name in names}
