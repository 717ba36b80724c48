"""Trials on a GPU: whole forwards over several routings, replayed from a CUDA graph.

With one routing a small batch would find its weights in the L2, and a GEMM alone hides what it waits for behind
its own next launch.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator

import torch
import triton
from torch import Tensor

from torch_moe_ops.backends.triton_engine import launch
from torch_moe_ops.backends.triton_engine.configs import Config, select
from torch_moe_ops.commands.tune.layers import Layer, random_call, routings, with_inputs
from torch_moe_ops.commands.tune.replays import replay_us
from torch_moe_ops.commands.tune.search import plan

# Another order of sums moves a result by far less, even where activations are rounded to 4 bits.
MAX_DIFFERENCE = 2e-2
# Too many registers or too much shared or device memory for this GPU, or a tile that Triton does not compile.
FAILURES = (triton.TritonError, triton.CompilationError, RuntimeError, ValueError, AssertionError)
ROUNDS = 9


def rules_of(layer: Layer, tokens: int) -> Config:
    """The configuration without tuning of one's own."""
    key = layer.key
    sizes = (key.top_k, key.num_experts, key.hidden_size, key.intermediate_size)
    return select(key.scheme, tokens, *sizes, key.act_format, own=False)


def graph_time(run: Callable[[], None], rounds: int = ROUNDS, worse_than: float = float("inf")) -> float:
    """Median microseconds of a captured run; fewer rounds where the first two are far above `worse_than`."""
    times = graph_times(run, rounds, worse_than)
    return sorted(times)[len(times) // 2]


def graph_times(run: Callable[[], None], rounds: int, worse_than: float = float("inf")) -> list[float]:
    """Microseconds of each replay of a captured run."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times: list[float] = []
    for done in range(rounds):
        times.append(replay_us(graph))
        if done == 1 and min(times) > 1.2 * worse_than:
            break
    return times


class Trial:
    """One layer and one number of tokens, ready to be timed with any configuration."""

    def __init__(self, layer: Layer, weights: object, tokens: int):
        self.calls = [with_inputs(weights, layer, tokens, 1000 + i) for i in range(routings(tokens))]  # type: ignore[arg-type]
        self.best = float("inf")
        self.failures: dict[str, int] = {}
        self._expected = self._forward(rules_of(layer, tokens))[0].double()

    def _forward(self, config: Config) -> list[Tensor]:
        outputs = [torch.empty_like(call.hidden_states) for call in self.calls]
        launch.run_experts(self.calls[0], outputs[0], config)
        return outputs

    def _wrong(self, out: Tensor) -> bool:
        difference = (out.double() - self._expected).norm() / self._expected.norm()
        return not bool(difference <= MAX_DIFFERENCE)

    def time(self, config: Config) -> float:
        """Median microseconds of a forward; infinite where it does not run or computes something else."""
        try:
            outputs = self._forward(config)
            if self._wrong(outputs[0]):
                return self._failed("result differs")
        except FAILURES as error:
            return self._failed(type(error).__name__)

        def run() -> None:
            for call, out in zip(self.calls, outputs, strict=True):
                launch.run_experts(call, out, config)

        us = graph_time(run, worse_than=self.best * len(outputs)) / len(outputs)
        self.best = min(self.best, us)
        return us

    def _failed(self, why: str) -> float:
        self.failures[why] = self.failures.get(why, 0) + 1
        return float("inf")


def compile_one(layer: Layer, tokens: int, configs: list[Config], deadline: float) -> int:
    """Put the kernels of some configurations into Triton's cache. Returns how many were compiled before the deadline.

    Sizes and alignments are those of the real layer, as Triton compiles for them, but only one expert has memory.
    """
    call = with_inputs(random_call(layer, torch.device("cuda"), one_expert=True), layer, tokens, 0, one_expert=True)
    out = torch.empty_like(call.hidden_states)
    done = 0
    for config in configs:
        if time.time() > deadline:
            break
        try:
            launch.run_experts(call, out, config)
            torch.cuda.synchronize()
        except Exception:  # a tile that does not fit is no error here: the trial will say so
            pass
        done += 1
    return done


def compile_ahead(
    layer: Layer, all_tokens: list[int], workers: int, deadline: float, advance: Callable[[int], None]
) -> None:
    """Compile everything that searches will time, in other processes. deadline: by time.time()."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        jobs = [pool.submit(compile_one, layer, t, configs, deadline) for t, configs in _shares(layer, all_tokens)]
        for job in concurrent.futures.as_completed(jobs):
            advance(job.result())


def _shares(layer: Layer, all_tokens: list[int], size: int = 4) -> Iterator[tuple[int, list[Config]]]:
    """Pieces of work. Numbers of tokens mostly share kernels: what an earlier one compiles, a later one finds."""
    seen: set[tuple[object, ...]] = set()
    for tokens in all_tokens:
        key = layer.key
        configs = plan(rules_of(layer, tokens), layer.bits, tokens, key.top_k, key.num_experts)
        # Launch parameters that kernels are compiled for: one token (no schedule), 16-divisible numbers of slots.
        kind = (tokens == 1, tokens * key.top_k % 16 == 0, tokens >= 128)
        fresh = [c for c in configs if (kind, c) not in seen]
        seen.update((kind, c) for c in fresh)
        for begin in range(0, len(fresh), size):
            yield tokens, fresh[begin : begin + size]


def default_workers() -> int:
    """Processes that compile: most of the cores, each of which also holds a CUDA context."""
    return max(1, min(16, (os.cpu_count() or 2) - 2))
