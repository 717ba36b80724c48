"""The warning of a layer that no kernel runs: `prepare` takes `reference` unasked, and says why and what mends it."""

from __future__ import annotations

import warnings

from torch_moe_ops.backends.explain import explain_problem
from torch_moe_ops.backends.registry import BACKENDS, Backend
from torch_moe_ops.core.problem import Problem

_SAID: set[tuple[object, ...]] = set()


def warn_of_reference(problem: Problem, stacklevel: int) -> None:
    """A RuntimeWarning, once for a device and what is missing there: a model has many layers."""
    where = problem.device if problem.capability is None else f"{problem.device} {problem.capability}"
    missing = _missing(problem)
    # Where sizes are what no kernel takes, they are no reason to say it for every layer.
    key = (where, *(missing or (problem.scheme, problem.act_format, problem.weight_policy, problem.dtype)))
    if key in _SAID:
        return
    _SAID.add(key)
    why = "; ".join(missing) if missing else f"no kernel runs it\n{explain_problem(problem)}"
    text = f"prepare: a layer of {problem.scheme!r} weights on {where} takes backend 'reference', pure torch and slow"
    warnings.warn(f"{text} (asked for by name it comes without this warning): {why}", RuntimeWarning, stacklevel + 1)


def _missing(problem: Problem) -> tuple[str, ...]:
    """What to install, of every backend that lacks nothing else; of those taken unasked, where there are any."""
    able = [b for name, b in BACKENDS.items() if name != "reference" and b.fits_anywhere(problem)]
    unasked = [b for b in able if b.auto and b.needs_no_measurement]
    return tuple(_to_install(backend, problem) for backend in unasked or able)


def _to_install(backend: Backend, problem: Problem) -> str:
    unmet = [(reason, r.mend) for r in backend.requires if (reason := r.unmet(problem)) is not None]
    text = f"{backend.name}: {'; '.join(reason for reason, _ in unmet)}"
    mends = [mend for _, mend in unmet if mend]
    return f"{text}; to mend it: {' && '.join(mends)}" if mends else text
