"""When a call of the C++ kernels waits for a team of threads, and when it goes alone."""

from __future__ import annotations

import ctypes

import pytest
from host_library import host_library


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = host_library("team_host.cpp", tmp_path_factory.mktemp("team"))
    for name in ("alone_calls", "alone_calls_after_recovery", "run_calls"):
        getattr(library, name).restype = ctypes.c_int64
    return library


def number(value: int) -> ctypes.c_int64:
    return ctypes.c_int64(value)


def test_a_late_team_is_left_out_for_longer_each_time(host: ctypes.CDLL) -> None:
    assert [host.alone_calls(number(late), number(100)) for late in range(9)] == [0, 1, 2, 4, 8, 16, 32, 64, 64]


def test_larger_calls_ask_for_the_team_again(host: ctypes.CDLL) -> None:
    assert host.alone_calls(number(3), number(101)) == 0
    assert host.alone_calls(number(3), number(1)) == 4


def test_a_team_on_time_halves_what_a_late_one_costs(host: ctypes.CDLL) -> None:
    assert host.alone_calls_after_recovery(number(3)) == 4  # after 4 calls: 2, and doubled again


def test_calls_do_not_wait_for_a_thread_that_comes_late(host: ctypes.CDLL) -> None:
    """Every task runs once, whoever runs it."""
    calls, tasks = 64, 10
    teams = (ctypes.c_int64 * calls)()
    assert host.run_calls(number(calls), number(tasks), number(5000), teams) == calls * tasks
    assert teams[0] == 1 and sum(teams) <= 6  # the first call, and after 1, 2, 4, 8, 16 and 32 more
