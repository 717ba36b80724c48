"""explain() and select(): one table, shown or acted on."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch_moe_ops.backends.accuracy import preferred
from torch_moe_ops.backends.measured.distance import statement
from torch_moe_ops.backends.registry import BACKENDS, Backend
from torch_moe_ops.core.problem import Problem

ENVIRONMENT_VARIABLE = "MOEQ_BACKEND"


@dataclass(frozen=True)
class Explanation:
    """Why a backend was chosen. `against` holds every unmet requirement of every backend ([]: it fits).

    accuracy: class and measured distance of every backend, and of one that is not strict why "auto" takes it or not.
    """

    problem: Problem
    requested: str
    chosen: str | None
    against: dict[str, list[str]]
    notes: dict[str, str]
    accuracy: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [str(self.problem)]
        if self.requested != "auto":
            lines.append(f"  requested: {self.requested}")
        width = max(len(name) for name in self.against)
        for name, reasons in self.against.items():
            mark = "->" if name == self.chosen else "no" if reasons else "ok"
            said = reasons or filter(None, (self.accuracy.get(name), self.notes[name]))
            text = "; ".join(said)
            lines.append(f"  {mark} {name:<{width}}  {text}".rstrip())
        return "\n".join(lines)


def requested_backend(backend: str) -> str:
    """The name asked for: the argument, else MOEQ_BACKEND, else "auto". The only reader of that variable."""
    if backend != "auto":
        return backend
    return os.environ.get(ENVIRONMENT_VARIABLE) or "auto"


def explain_problem(problem: Problem, requested: str = "auto") -> Explanation:
    """Evaluate every requirement of every backend for a problem."""
    against = {name: backend.reasons(problem) for name, backend in BACKENDS.items()}
    notes = {name: backend.notes(problem) for name, backend in BACKENDS.items()}
    fitting = [name for name, reasons in against.items() if not reasons]
    first = _first_choice(problem, fitting)
    better, why = preferred(problem, fitting, first)
    accuracy = {name: "; ".join(filter(None, (statement(name, problem), why.get(name)))) for name in fitting}
    chosen = better or first
    if requested != "auto":
        chosen = requested if requested in fitting else None
    return Explanation(problem, requested, chosen, against, notes, accuracy)


def _first_choice(problem: Problem, fitting: Iterable[str]) -> str | None:
    """Of those that need no measurement the first one that may be taken unasked, else the first."""
    names = [name for name in fitting if BACKENDS[name].needs_no_measurement]
    return next((name for name in names if BACKENDS[name].auto), None) or next(iter(names), None)


def default_on(problem: Problem) -> str | None:
    """What "auto" takes where every backend of this library that the problem's device can have is installed."""
    fitting = [name for name, b in BACKENDS.items() if b.fits_anywhere(problem) and not b.of_the_field]
    first = _first_choice(problem, fitting)
    return preferred(problem, fitting, first)[0] or first


def check_requested(name: str) -> str:
    """The name, or ValueError where no backend has it."""
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"backend must be 'auto' or one of {list(BACKENDS)}, got {name!r}")
    return name


def select(problem: Problem, requested: str = "auto") -> Backend:
    """The backend for a problem; ValueError with the whole table where none fits or the asked one does not."""
    explanation = explain_problem(problem, check_requested(requested))
    if explanation.chosen is None:
        what = "no backend can" if requested == "auto" else f"backend {requested!r} cannot"
        raise ValueError(f"{what} run this problem\n{explanation}")
    return BACKENDS[explanation.chosen]
