"""Where things lie that tests read or start."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # of the repository
TESTS = ROOT / "tests"
DATA = TESTS / "data"
CPP = TESTS / "cpp"
PROGRAMS = TESTS / "programs"
