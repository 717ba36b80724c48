"""Expert parallelism of two and four processes over gloo, against one process. The cases: tests/support/ep_cases.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from ep_cases import CASES, QUICK, SLOW
from paths import ROOT, TESTS

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")

SECONDS = 500


def _run(size: int, names: list[str], folder: Path) -> dict[str, list[str]]:
    """Case -> what became of it on each rank."""
    program = str(TESTS / "programs" / "ep_ranks.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    outs = [folder / f"{rank}.json" for rank in range(size)]
    ranks = [
        subprocess.Popen(
            [sys.executable, program, str(rank), str(size), str(folder / "store"), str(out), *names], env=environment
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


def _fixture(size: int, names: list[str]) -> pytest.FixtureRequest:
    def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[str]]]:
        yield _run(size, names, tmp_path_factory.mktemp(f"ranks{size}"))

    return pytest.fixture(scope="module", name=f"of_{size}_{len(names)}")(outcomes)


QUICK_NAMES, SLOW_NAMES = [f.__name__ for f in QUICK], [f.__name__ for f in SLOW]
of_two_quick = _fixture(2, QUICK_NAMES)
of_two_slow = _fixture(2, SLOW_NAMES)
of_four = _fixture(4, list(CASES))


def _check(outcomes: dict[str, list[str]], name: str) -> None:
    for rank, outcome in enumerate(outcomes[name]):
        assert outcome == "passed", f"rank {rank}:\n{outcome}"


@pytest.mark.parametrize("name", QUICK_NAMES)
def test_two_ranks(name: str, request: pytest.FixtureRequest) -> None:
    _check(request.getfixturevalue(f"of_2_{len(QUICK_NAMES)}"), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_NAMES)
def test_two_ranks_slow(name: str, request: pytest.FixtureRequest) -> None:
    _check(request.getfixturevalue(f"of_2_{len(SLOW_NAMES)}"), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CASES))
def test_four_ranks(name: str, request: pytest.FixtureRequest) -> None:
    _check(request.getfixturevalue(f"of_4_{len(CASES)}"), name)
