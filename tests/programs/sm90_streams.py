"""The Hopper kernels while other work shares the GPU, a scenario a process: test_cuda_sm90_streams.py starts them.

What is not done in time is told by name, and ends the process.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import green_contexts
import sm90_green_streams
import torch
from sm90_shared_gpu import WORKERS, Worker, report, workers

GREEN: list[green_contexts.GreenContext] = []  # where streams are made, if not in the whole device


def new_stream(priority: int = 0) -> torch.cuda.Stream:
    return GREEN[0].stream(priority) if GREEN else torch.cuda.Stream(priority=priority)


def eager(turns: int) -> list[Worker]:
    """Launches of three streams in turns, one of them of high priority."""
    found = workers([new_stream(priority) for priority in (0, -1, 0)])
    for at in range(turns):
        for worker in found:
            worker.launch(at)
    return found


def threads(turns: int) -> list[Worker]:
    """Two streams, each fed by a thread of the host."""
    found = workers([new_stream(), new_stream()])
    feeders = [
        threading.Thread(target=lambda worker=worker: [worker.launch(at) for at in range(turns)]) for worker in found
    ]
    for feeder in feeders:
        feeder.start()
    for feeder in feeders:
        feeder.join()
    return found


def graphs(turns: int) -> list[Worker]:
    """Two graphs replayed on two streams at once."""
    found = workers([new_stream(), new_stream()])
    captured = [worker.capture() for worker in found]
    for _ in range(turns // 4):
        for worker, graph in zip(found, captured, strict=True):
            worker.replay(graph)
    return found


def branches(turns: int) -> list[Worker]:
    """One graph with two branches that may run at once."""
    found = workers([new_stream(), new_stream()])
    graph, first = torch.cuda.CUDAGraph(), found[0].stream
    with torch.cuda.graph(graph, stream=first):
        found[1].stream.wait_stream(first)
        for at in range(max(len(worker.jobs) for worker in found)):
            for worker in found:
                worker.launch(at)
        first.wait_stream(found[1].stream)
    for _ in range(turns // 4):
        found[0].replay(graph)
    return found


def beside(turns: int) -> list[Worker]:
    """Long foreign kernels: matmuls of 64 blocks, which hold half of the multiprocessors, and blocks that only wait."""
    found = workers([new_stream(), new_stream()])
    captured = found[1].capture()
    long = torch.randn(1024, 1 << 18, device="cuda").bfloat16()
    foreign = [torch.cuda.Stream() for _ in range(6)]
    for at in range(turns):
        for number, stream in enumerate(foreign):
            with torch.cuda.stream(stream):
                if number < 2 and at % 8 == 0:
                    long @ long.t()
                elif number >= 2:
                    torch.cuda._sleep(100_000)
        found[0].launch(at)
        if at % 8 == 0:
            found[1].replay(captured)
    return found


OF_ANY_CONTEXT = {run.__name__: run for run in (eager, threads, graphs, branches, beside)}
SCENARIOS = OF_ANY_CONTEXT | sm90_green_streams.SCENARIOS


def give_up(seconds: float) -> None:
    print(f"not done after {seconds} s; streams wait for: {[worker.waits_for() for worker in WORKERS]}", flush=True)
    os._exit(3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenario", choices=sorted(SCENARIOS))
    parser.add_argument("--turns", type=int, default=200, help="launches of each stream")
    parser.add_argument("--seconds", type=float, default=60.0, help="after which the process ends itself")
    parser.add_argument("--green", type=int, default=0, help="multiprocessors of a green context for all streams")
    args = parser.parse_args()
    watch = threading.Timer(args.seconds, give_up, (args.seconds,))
    watch.daemon = True
    watch.start()
    if args.green > 0:
        GREEN.extend(green_contexts.split(args.green, 1))
    report(args.scenario, SCENARIOS[args.scenario](args.turns))


if __name__ == "__main__":
    main()
