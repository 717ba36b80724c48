"""Times of a function in a CUDA graph, and what share of a decode step routers and experts take, from a profile."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

REPLAYS = 20
# Parts of the names of this library's kernels: those compiled from C++ are in the namespace moeq, the rest is Triton's.
ROUTE = "route_kernel"
ROUTER = "route_hidden_kernel"  # product and routing
EXPERTS = ("moeq::", "prologue_kernel", "schedule_kernel", "gemm1_kernel", "gemm2_kernel", "combine_kernel")
# Parts of the names of others' kernels that multiply matrices: the last one before the experts gives the logits.
PRODUCTS = ("gemm", "gemv", "nvjet", "cutlass", "dot_kernel")
PROFILED = 3


class Kernel(NamedTuple):
    """One kernel of a profile, in microseconds since some moment."""

    name: str
    begin: float
    end: float


def nothing() -> None:
    """What is done between replays of a function that changes no state."""


def capture(run: Callable[[], Any], rewind: Callable[[], None] = nothing) -> Callable[[], Any]:
    """A function that replays `run`; on a CPU `run` itself."""
    if not torch.cuda.is_available():
        return run
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    rewind()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def timed(
    replay: Callable[[], Any], rounds: int, rewind: Callable[[], None] = nothing, limit_s: float = 2.0
) -> dict[str, float]:
    """Milliseconds of a call: the median and the least of `rounds` rounds, of fewer (three at least) past `limit_s`."""
    if not torch.cuda.is_available():
        return summary([seconds(replay, rewind) * 1e3 for _ in range(2)])
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < rounds and (len(times) < 3 or time.perf_counter() - began < limit_s):
        rewind()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        replay()
        begin.record()
        for _ in range(REPLAYS):
            replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / REPLAYS)
    return summary(times)


def seconds(run: Callable[[], Any], rewind: Callable[[], None] = nothing) -> float:
    """Seconds of one call."""
    rewind()
    begin = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def summary(times: list[float]) -> dict[str, float]:
    return {"ms": round(statistics.median(times), 4), "ms_min": round(min(times), 4)}


def profile(replay: Callable[[], Any], layers: int, rewind: Callable[[], None] = nothing) -> dict[str, Any]:
    """Where the time of a decode step goes: see `shares`. The medians of three replays.

    Raises: ValueError as `shares` does, and without a GPU.
    """
    if not torch.cuda.is_available():
        raise ValueError("profile: a GPU is needed")
    found: list[dict[str, float]] = []
    for _ in range(PROFILED):
        rewind()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            replay()
            torch.cuda.synchronize()
        cuda = torch.autograd.DeviceType.CUDA
        events = [event for event in trace.events() or [] if event.device_type == cuda]
        kernels = [Kernel(e.name, float(e.time_range.start), float(e.time_range.end)) for e in events]
        found.append(shares(kernels, layers))
    return {name: round(statistics.median(one[name] for one in found), 3) for name in found[0]}


def shares(kernels: list[Kernel], layers: int) -> dict[str, float]:
    """Microseconds a layer of router and experts within one step, from its kernels.

    A layer's router begins with the kernel whose product gives its logits: the last one before its experts' first
    kernel. "block_us" is from there to the end of its experts' last kernel, gaps included; "span_us" from the end of
    the kernels in front of it, so that neither a launch nor a kernel that begins early and waits is left out or counted
    twice. "router_us" and "experts_us" are durations alone, added up ("experts_us" counts overlapping kernels twice).

    Raises: ValueError where other than `layers` layers are found.
    """
    kernels = sorted(kernels, key=lambda kernel: kernel.begin)
    blocks = _blocks([kernel.name for kernel in kernels])
    if len(blocks) != layers:
        names = sorted({kernel.name[:60] for kernel in kernels})
        raise ValueError(f"profile: {layers} layers of experts must be found, got {len(blocks)}; kernels: {names}")
    router = experts = block = span = 0.0
    for logits, start, stop in blocks:
        router += sum(kernel.end - kernel.begin for kernel in kernels[logits:start])
        experts += sum(kernel.end - kernel.begin for kernel in kernels[start:stop])
        end = max(kernel.end for kernel in kernels[logits:stop])
        block += end - kernels[logits].begin
        span += end - max((kernel.end for kernel in kernels[:logits]), default=kernels[logits].begin)
    step = max(kernel.end for kernel in kernels) - kernels[0].begin
    return {
        "router_us": router / layers,
        "experts_us": experts / layers,
        "block_us": block / layers,
        "span_us": span / layers,
        "blocks_ms": block / 1e3,
        "step_ms": step / 1e3,
        "kernels": len(kernels),
    }


def _blocks(names: list[str]) -> list[tuple[int, int, int]]:
    """Of every layer the places of its router's first kernel, its experts' first, and the one after their last."""
    found: list[tuple[int, int, int]] = []
    product: int | None = None  # the last one since experts ran
    for i, name in enumerate(names):
        if ROUTER in name:
            product = i
        elif ROUTE not in name and any(part in name for part in EXPERTS):
            if product is not None or not found:
                found.append((i if product is None else product, i, i + 1))
            else:
                found[-1] = (*found[-1][:2], i + 1)
            product = None
        elif any(part in name.lower() for part in PRODUCTS) and "reduce" not in name.lower():
            product = i
    return found
