"""Which of the backends that are not strict `prepare` takes unasked.

Kernels of the field itself (FlashInfer's) are taken as their order says; ours by what was measured (measured/).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch_moe_ops.backends.measured.distance import too_far
from torch_moe_ops.backends.measured.speed import fastest, speed
from torch_moe_ops.backends.registry import BACKENDS
from torch_moe_ops.core.problem import Problem


def preferred(problem: Problem, fitting: Iterable[str], first: str | None) -> tuple[str | None, dict[str, str]]:
    """The backend that "auto" takes in the place of `first`, None for none; and why, for each that could be.

    Args:
        fitting: backends that can run the problem.
        first: the first of them that needs no measurement.
    """
    means: dict[str, float] = {}
    why: dict[str, str] = {}
    for name in fitting:
        if BACKENDS[name].needs_no_measurement or not BACKENDS[name].auto:
            continue
        mean, reason = math.inf, too_far(name, problem)
        if reason is None and first is not None:
            mean, reason = speed(name, first, problem)
        taken = "" if mean < math.inf else "by name only: "
        why[name] = taken + (reason or "there is nothing to be faster than")
        if mean < math.inf:
            means[name] = mean
    return fastest(means, problem), why
