"""Scenarios of sm90_streams.py with kernels in green contexts: parts of the multiprocessors, which run beside each other
and beside what has all of them."""

from __future__ import annotations

import green_contexts
import torch
from sm90_shared_gpu import Worker, all_jobs, bits, workers

HALF = 64
EACH_OF_TWO = 56  # parts are made of whole clusters of multiprocessors, which do not divide evenly everywhere
SIZES = (8, 16, 40, 72, 104, 120)
# Of a sum cut at other places: float32 sums differ, and now and then how an intermediate rounds.
BOUND = 5e-3


def in_turns(found: list[Worker], turns: int) -> list[Worker]:
    """Eager launches, and now and then a graph of each stream."""
    captured = [worker.capture() for worker in found]
    for at in range(turns):
        for worker, graph in zip(found, captured, strict=True):
            worker.launch(at)
            if at % 8 == 0:
                worker.replay(graph)
    return found


def two_contexts(turns: int) -> list[Worker]:
    """Two halves of the device at once: cooperative launches that overlap."""
    halves = green_contexts.split(EACH_OF_TWO, 2)
    return in_turns(workers([half.stream() for half in halves for _ in range(2)]), turns)


def part_and_whole(turns: int) -> list[Worker]:
    """A half of the device, and all of it."""
    (half,) = green_contexts.split(HALF, 1)
    return in_turns(workers([half.stream(), torch.cuda.Stream()]), turns)


def elsewhere(turns: int) -> list[Worker]:
    """Graphs that are replayed on a stream of another context than the one they were captured in."""
    (half,) = green_contexts.split(HALF, 1)
    found = workers([half.stream(), torch.cuda.Stream()])
    captured = [worker.capture() for worker in found]
    for _ in range(turns // 8):
        for worker, graph in zip(found, captured[::-1], strict=True):
            worker.replay(graph)
        torch.cuda.synchronize()
        for worker, graph in zip(found, captured, strict=True):
            worker.replay(graph)
        torch.cuda.synchronize()
    return found


def sizes(turns: int) -> list[Worker]:
    """All calls with few and many multiprocessors: the results of the whole device, but for how sums are cut."""
    jobs, found = all_jobs(), []
    want = {job.name: job.run() for job in jobs}
    torch.cuda.synchronize()
    for count in SIZES:
        (part,) = green_contexts.split(count, 1)
        found.append(Worker(jobs, part.stream()))
        for job, alone in zip(jobs, found[-1].alone, strict=True):
            expected, got = want[job.name].double(), alone.view(want[job.name].dtype).double()
            error = ((got - expected).norm() / expected.norm()).item()
            assert error < BOUND, f"{job.name} with {part.multiprocessors} multiprocessors: relative error {error:.2e}"
            if bits(want[job.name]).equal(alone):
                continue
            print(f"{job.name} with {part.multiprocessors} multiprocessors: relative difference {error:.1e}")
    return in_turns(found[:2], turns // 4)


SCENARIOS = {run.__name__: run for run in (two_contexts, part_and_whole, elsewhere, sizes)}
