"""When a call of the C++ kernels waits for a team of threads, and what does its work when it does not."""

from __future__ import annotations

import ctypes
import os

import pytest
from host_library import host_library


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = host_library("team_host.cpp", tmp_path_factory.mktemp("team"))
    names = ("alone_calls", "alone_calls_after_recovery", "run_calls")
    names += ("wrong_tasks", "wrong_tasks_in_a_child", "taken_twice", "run_beside_a_late_helper")
    names += ("cores_of_a_helper_of_a_bound_caller", "wrong_passes")
    for name in names:
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


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_passes_run_every_task_once_and_the_one_that_was_told_next(host: ctypes.CDLL, threads: int) -> None:
    told = ctypes.c_int64()
    runs = 1000 // threads
    assert host.wrong_passes(number(runs), number(threads), ctypes.byref(told)) == 0
    if threads == 1:  # each task before the one up to which a pass draws ahead, but the last
        ends = ((i % 67 - 1, i % 71 - 3) for i in range(runs))
        assert told.value == sum(max(min(last, ahead), 0) for last, ahead in ends)


@pytest.mark.parametrize("count", [0, 1, 3, 40])
def test_helpers_run_every_task_once(host: ctypes.CDLL, count: int) -> None:
    assert host.wrong_tasks(number(5000), number(count)) == 0


def test_a_forked_child_has_helpers_of_its_own(host: ctypes.CDLL) -> None:
    assert host.wrong_tasks(number(100), number(2)) == 0
    assert host.wrong_tasks_in_a_child(number(500), number(2)) == 0


def test_one_call_at_a_time_has_the_helpers(host: ctypes.CDLL) -> None:
    assert host.taken_twice() == 1


def test_a_run_waits_for_a_task_that_a_helper_is_at(host: ctypes.CDLL) -> None:
    """Longer than anybody spins: the caller sleeps, and is woken."""
    assert host.run_beside_a_late_helper(number(50)) >= 50


def test_helpers_are_not_bound_where_their_caller_is(host: ctypes.CDLL) -> None:
    """OMP_PROC_BIND binds each thread to a core of its own, and who is started by one inherits it."""
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        pytest.skip("this process has one core")
    assert host.cores_of_a_helper_of_a_bound_caller() == cores
