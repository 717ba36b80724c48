"""Calls on the Hopper kernels, and streams that take them in turns: what the scenarios of sm90_streams.py are made of.

Every result must be bit for bit that of the same call alone, on the same stream: how sums are cut depends on the
multiprocessors that the stream's context has.
"""

from __future__ import annotations

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
    ("nvfp4", {"act_format": "fp8"}, (16, 4, 1024, 704), (11, 40, 300, 1500)),
    ("nvfp4", {"act_format": "fp8", "weight_policy": "packed"}, (16, 2, 1024, 704), (70, 600)),
    ("nvfp4", {"act_format": "fp8", "weight_policy": "folded"}, (16, 2, 1024, 704), (9, 300)),
    ("none", {"act_format": "none"}, (16, 2, 1024, 704), (300, 900)),
    ("mxfp4", {"act_format": "fp8", "weight_policy": "packed"}, (16, 2, 1024, 704), (5, 70)),
)
START = time.monotonic()
WORKERS: list[Worker] = []  # all there are, for who reports what is not done
FROM_LOGITS = (5, 40)  # numbers of tokens of the first layer, which then routes in the call


class Job(NamedTuple):
    name: str
    run: Callable[[], Tensor]


def bits(out: Tensor) -> Tensor:
    return out.view(torch.int16)


def jobs_of(at: int) -> list[Job]:
    """Those of a layer."""
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
        found.append(Job(name, lambda x=x, chosen=chosen: moe.fused_moe_routed(x, *chosen, w)))
    for tokens in FROM_LOGITS if at == 0 else ():
        x, logits = random(tokens, hidden), random(tokens, experts)
        found.append(Job(f"logits M={tokens}", lambda x=x, logits=logits: moe.fused_moe(x, logits, w, routing=routing)))
    return found


def all_jobs() -> list[Job]:
    found = [job for at in range(len(LAYERS)) for job in jobs_of(at)]
    print(f"{len(found)} jobs after {time.monotonic() - START:.1f} s", flush=True)
    return found


class Worker:
    """A stream with jobs, and counts of results that were not those of the jobs alone."""

    def __init__(self, jobs: list[Job], stream: torch.cuda.Stream):
        self.jobs, self.stream = jobs, stream
        self.wrong = torch.zeros(len(jobs), dtype=torch.int32, device="cuda")
        self.marks: list[tuple[str, torch.cuda.Event]] = []
        torch.cuda.synchronize()
        once = {job.name: self.result_alone(job) for job in jobs}
        self.alone = [once[job.name] for job in jobs]
        WORKERS.append(self)

    def result_alone(self, job: Job) -> Tensor:
        with torch.cuda.stream(self.stream):
            alone = bits(job.run()).clone()
            assert alone.any() and torch.equal(alone, bits(job.run())), f"{job.name}: two runs alone differ"
        torch.cuda.synchronize()
        return alone

    def launch(self, at: int) -> None:
        """The job of this turn, and the comparison behind it in the stream."""
        at %= len(self.jobs)
        with torch.cuda.stream(self.stream):
            out = self.jobs[at].run()
            self.wrong[at] += (bits(out) != self.alone[at]).any()
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


def workers(streams: list[torch.cuda.Stream]) -> list[Worker]:
    """All jobs dealt out; a second round the other way about, so that streams meet in other pairs."""
    jobs, count = all_jobs(), len(streams)
    return [Worker(jobs[at::count] + jobs[::-1][at::count], stream) for at, stream in enumerate(streams)]


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
