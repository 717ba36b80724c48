"""Expert parallelism of two and four processes over gloo, against one process. The cases: tests/support/ep_cases.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from ep_adapters import ADAPTERS, DIVIDED
from ep_cases import CASES, QUICK, SLOW
from ep_errors import ERRORS
from ep_partial_rows import PARTIAL_ROWS, PARTIAL_ROWS_DIVIDED
from ranks import run_ranks

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")


def _fixture(name: str, size: int, names: list[str]) -> pytest.FixtureRequest:
    def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[str]]]:
        yield run_ranks(size, names, tmp_path_factory.mktemp(f"ranks{size}"))

    return pytest.fixture(scope="module", name=name)(outcomes)


QUICK_NAMES, SLOW_NAMES = [*(f.__name__ for f in QUICK), *ERRORS, *ADAPTERS, *PARTIAL_ROWS], [f.__name__ for f in SLOW]
of_two_quick = _fixture("of_two_quick", 2, QUICK_NAMES)
of_two_slow = _fixture("of_two_slow", 2, SLOW_NAMES)
FOUR_NAMES = [*CASES, *ERRORS, *ADAPTERS, *DIVIDED, *PARTIAL_ROWS, *PARTIAL_ROWS_DIVIDED]
of_four = _fixture("of_four", 4, FOUR_NAMES)


def _check(outcomes: dict[str, list[str]], name: str) -> None:
    for rank, outcome in enumerate(outcomes[name]):
        assert outcome == "passed", f"rank {rank}:\n{outcome}"


@pytest.mark.parametrize("name", QUICK_NAMES)
def test_two_ranks(name: str, request: pytest.FixtureRequest) -> None:
    _check(request.getfixturevalue("of_two_quick"), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_NAMES)
def test_two_ranks_slow(name: str, request: pytest.FixtureRequest) -> None:
    _check(request.getfixturevalue("of_two_slow"), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR_NAMES)
def test_four_ranks(name: str, request: pytest.FixtureRequest) -> None:
    _check(request.getfixturevalue("of_four"), name)
