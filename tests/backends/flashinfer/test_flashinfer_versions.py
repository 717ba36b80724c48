"""The contract tests against further releases: MOEQ_FLASHINFER_PATHS names folders made by

    pip install --no-deps --target FOLDER flashinfer-python==VERSION

`scripts/flashinfer_releases.sh` makes them for the oldest and the newest supported release.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

PATHS = [p for p in os.environ.get("MOEQ_FLASHINFER_PATHS", "").split(os.pathsep) if p]


@pytest.mark.skipif(not PATHS, reason="MOEQ_FLASHINFER_PATHS names no further releases")
@pytest.mark.parametrize("path", PATHS or [""])
def test_contract_of_another_release(path: str) -> None:
    this = Path(__file__)
    files = sorted(str(file) for file in this.parent.glob("test_flashinfer_*.py") if file.name != this.name)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([path, os.environ.get("PYTHONPATH", "")])}
    environment.pop("MOEQ_FLASHINFER_PATHS")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:]
    which = "import flashinfer; print(flashinfer.__file__)"
    used = subprocess.run([sys.executable, "-c", which], env=environment, capture_output=True, text=True, timeout=120)
    assert used.stdout.strip().splitlines()[-1].startswith(path), used.stdout
