"""Which of two backends was measured to be the faster one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from torch_moe_ops.backends.measured.records import MIN_LAYERS, Record, times_of
from torch_moe_ops.core.problem import Problem

MIN_TOKENS = 3  # numbers of tokens at which a layer was timed
# What two timings of one kernel differ by. A backend that takes more of a strict one's time, at any number of tokens,
# is slower; two whose mean times are within it are as fast.
SLOWER = 1.03
# But for a backend that takes at most LOSS of the strict one's time somewhere, which loses far more elsewhere: in the
# mean, which is at most GAIN, or where it loses most, MORE times as much. Weights are prepared for one of them.
LOSS, GAIN, MORE = 1.15, 0.8, 2.0


def _timed(problem: Problem) -> tuple[bool, list[Record]]:
    """Whether the layer itself was timed, and the records that tell which backend is faster."""
    alike = times_of(problem)
    sizes = (problem.num_local_experts, problem.hidden_size, problem.intermediate_size)
    own = [
        record
        for record in alike
        if (record["num_experts"], record["hidden_size"], record["intermediate_size"]) == sizes
        and problem.top_k in (None, record["top_k"])
    ]
    return bool(own), own or alike


def _ratios(backend: str, other: str, records: Iterable[Record]) -> list[float] | None:
    """Times of a backend over those of another one, for each layer and number of tokens; None: too few of a layer."""
    found: list[float] = []
    for record in records:
        mine, theirs = (record["us"].get(name, {}) for name in (backend, other))
        common = mine.keys() & theirs.keys()
        if len(common) < MIN_TOKENS:
            return None
        found += [mine[tokens] / theirs[tokens] for tokens in common]
    return found


def speed(backend: str, other: str, problem: Problem) -> tuple[float, str]:
    """Mean time of a backend over that of another one, infinite where it is not taken for it; and why.

    It is taken where it was never slower, or little beside what it gains (LOSS, GAIN, MORE): on this layer, or else on
    every layer with such weights that was timed.
    """
    own, records = _timed(problem)
    if not own and len(records) < MIN_LAYERS:
        return math.inf, f"no record says that it is faster than {other} on such a layer"
    ratios = _ratios(backend, other, records)
    if not ratios:
        return math.inf, f"it was not timed beside {other} at {MIN_TOKENS} numbers of tokens"
    where = "this layer" if own else f"{len(records)} layers with such weights"
    timings = f"{len(ratios)} timings on {where}"
    slower, worst = sum(ratio > SLOWER for ratio in ratios), max(ratios)
    mean = math.exp(sum(math.log(ratio) for ratio in ratios) / len(ratios))
    if not slower and mean < 1:
        return mean, f"never slower than {other} in {timings}, {mean:.2f} of its time in the mean"
    others_loss = 1 / min(ratios) - 1
    if worst <= LOSS and (mean <= GAIN or (mean < 1 and others_loss >= MORE * (worst - 1))):
        return mean, (
            f"up to {worst:.2f} of {other}'s time in {slower} of {timings}, {min(ratios):.2f} to {worst:.2f} in all, "
            f"{mean:.2f} in the mean"
        )
    return math.inf, f"it was slower than {other} in {slower} of {timings}"


def fastest(means: Mapping[str, float], problem: Problem) -> str | None:
    """The backend of the least mean time. Among those as fast in the mean, the one that others beat by least."""
    if not means:
        return None
    least, records = min(means.values()), _timed(problem)[1]
    equal = [name for name, mean in means.items() if mean <= SLOWER * least]

    def beaten(name: str) -> float:
        return max((max(_ratios(name, other, records) or [1.0]) for other in equal if other != name), default=1.0)

    return min(equal, key=lambda name: (beaten(name), means[name]))
