"""The Hopper kernels while other work shares the GPU, a scenario a process: test_cuda_sm90_streams.py starts them.

Every result must be bit for bit that of the same call alone. What is not done in time is told by name, and ends the
process.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import torch_moe_ops as moe

# Forms of a layer: scheme, what `prepare` is told, experts, top_k, hidden, inter, and numbers of tokens that give every
# kernel: for few tokens, with grid barriers, slim, narrow and wide tiles of prefill, two launches of it, fp8, bf16.
LAYERS: tuple[tuple[str, dict[str, str], tuple[int, int, int, int], tuple[int, ...]], ...] = (
    ("nvfp4", {"act_format": "none"}, (56, 8, 4096, 128), (1, 3, 12, 60, 500, 1500)),
    ("nvfp4", {"act_format": "nvfp4"}, (16, 2, 1024, 704), (2, 8, 13, 100)),
    ("mxfp4", {"act_format": "none"}, (24, 4, 2880, 128), (3, 14, 200)),
    ("nvfp4", {"act_format": "fp8", "weight_policy": "packed"}, (16, 2, 1024, 704), (70, 600)),
    ("nvfp4", {"act_format": "fp8", "weight_policy": "folded"}, (16, 2, 1024, 704), (9, 300)),
    ("none", {"act_format": "none"}, (16, 2, 1024, 704), (300, 900)),
)
START = time.monotonic()
FROM_LOGITS = (5, 40)  # numbers of tokens of the first layer, which then routes in the call


class Job(NamedTuple):
    """A call, and the bits of its result alone."""

    name: str
    run: Callable[[], Tensor]
    alone: Tensor


def bits(out: Tensor) -> Tensor:
    return out.view(torch.int16)


def job(name: str, run: Callable[[], Tensor]) -> Job:
    alone = bits(run()).clone()
    torch.cuda.synchronize()
    assert alone.any() and torch.equal(alone, bits(run())), f"{name}: two runs alone differ"
    return Job(name, run, alone)


def jobs_of(at: int) -> list[Job]:
    scheme, settings, (experts, top_k, hidden, inter), all_tokens = LAYERS[at]
    g = torch.Generator("cuda").manual_seed(at)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device="cuda", dtype=torch.bfloat16)

    w13, w2 = random(experts, 2 * inter, hidden) / hidden**0.5, random(experts, hidden, inter) / inter**0.5
    w = moe.prepare(moe.quantize_experts(w13, w2, scheme), **settings)
    assert w.backend.startswith("cuda_sm90"), w.backend
    routing = moe.Routing("renormalize", top_k)
    found = []
    for tokens in all_tokens:
        x, chosen = random(tokens, hidden), moe.route(random(tokens, experts), routing)
        name = f"{w.backend} {scheme} {settings['act_format']} M={tokens}"
        found.append(job(name, lambda x=x, chosen=chosen: moe.fused_moe_routed(x, *chosen, w)))
    for tokens in FROM_LOGITS if at == 0 else ():
        x, logits = random(tokens, hidden), random(tokens, experts)
        found.append(job(f"logits M={tokens}", lambda x=x, logits=logits: moe.fused_moe(x, logits, w, routing=routing)))
    return found


class Worker:
    """A stream with jobs, and counts of results that were not those of the jobs alone."""

    def __init__(self, jobs: list[Job], priority: int = 0):
        self.jobs, self.stream = jobs, torch.cuda.Stream(priority=priority)
        self.wrong = torch.zeros(len(jobs), dtype=torch.int32, device="cuda")
        self.marks: list[tuple[str, torch.cuda.Event]] = []
        torch.cuda.synchronize()

    def launch(self, at: int) -> None:
        """The job of this turn, and the comparison behind it in the stream."""
        at %= len(self.jobs)
        with torch.cuda.stream(self.stream):
            out = self.jobs[at].run()
            self.wrong[at] += (bits(out) != self.jobs[at].alone).any()
            if not torch.cuda.is_current_stream_capturing():
                self.mark(self.jobs[at].name)

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        with torch.cuda.stream(self.stream):
            graph.replay()
            self.mark("a graph")

    def mark(self, name: str) -> None:
        event = torch.cuda.Event()
        event.record(self.stream)
        self.marks.append((name, event))

    def waits_for(self) -> str:
        """The first work of the stream that is not done."""
        waiting = [at for at, (_, event) in enumerate(self.marks) if not event.query()]
        return f"{waiting[0]} of {len(self.marks)}: {self.marks[waiting[0]][0]}" if waiting else "nothing"

    def capture(self) -> torch.cuda.CUDAGraph:
        """A graph of all jobs and their comparisons, one after another."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            for at in range(len(self.jobs)):
                self.launch(at)
        return graph


WORKERS: list[Worker] = []


def workers(count: int, priorities: tuple[int, ...] = (0,)) -> list[Worker]:
    """All jobs dealt out; a second round the other way about, so that streams meet in other pairs."""
    every = [found for at in range(len(LAYERS)) for found in jobs_of(at)]
    for at in range(count):
        mine = every[at::count] + every[::-1][at::count]
        WORKERS.append(Worker(mine, priorities[at % len(priorities)]))
    print(f"{len(every)} jobs after {time.monotonic() - START:.1f} s", flush=True)
    return WORKERS


def report(scenario: str, all_workers: list[Worker]) -> None:
    torch.cuda.synchronize()
    wrong = [
        f"{job.name}: {count}"
        for worker in all_workers
        for job, count in zip(worker.jobs, worker.wrong.tolist(), strict=True)
        if count
    ]
    assert not wrong, f"{scenario}: results that differ from those alone: {wrong}"
    print(f"{scenario}: all results are those alone, {time.monotonic() - START:.1f} s", flush=True)


def eager(turns: int) -> list[Worker]:
    """Launches of three streams in turns, one of them of high priority."""
    found = workers(3, (0, -1))
    for at in range(turns):
        for worker in found:
            worker.launch(at)
    return found


def threads(turns: int) -> list[Worker]:
    """Two streams, each fed by a thread of the host."""
    found = workers(2)
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
    found = workers(2)
    captured = [worker.capture() for worker in found]
    for _ in range(turns // 4):
        for worker, graph in zip(found, captured, strict=True):
            worker.replay(graph)
    return found


def branches(turns: int) -> list[Worker]:
    """One graph with two branches that may run at once."""
    found = workers(2)
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
    found = workers(2)
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


SCENARIOS = {run.__name__: run for run in (eager, threads, graphs, branches, beside)}


def give_up(seconds: float) -> None:
    print(f"not done after {seconds} s; streams wait for: {[worker.waits_for() for worker in WORKERS]}", flush=True)
    os._exit(3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenario", choices=sorted(SCENARIOS))
    parser.add_argument("--turns", type=int, default=200, help="launches of each stream")
    parser.add_argument("--seconds", type=float, default=60.0, help="after which the process ends itself")
    args = parser.parse_args()
    watch = threading.Timer(args.seconds, give_up, (args.seconds,))
    watch.daemon = True
    watch.start()
    report(args.scenario, SCENARIOS[args.scenario](args.turns))


if __name__ == "__main__":
    main()
