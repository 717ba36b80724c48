"""explain() and select(): one table, shown or acted on."""

from __future__ import annotations

import os
from dataclasses import dataclass

from torch_moe_ops.backends.registry import BACKENDS, Backend
from torch_moe_ops.core.problem import Problem

ENVIRONMENT_VARIABLE = "MOEQ_BACKEND"


@dataclass(frozen=True)
class Explanation:
    """Why a backend was chosen. `against` holds every unmet requirement of every backend ([]: it fits)."""

    problem: Problem
    requested: str
    chosen: str | None
    against: dict[str, list[str]]
    notes: dict[str, str]

    def __str__(self) -> str:
        lines = [str(self.problem)]
        if self.requested != "auto":
            lines.append(f"  requested: {self.requested}")
        width = max(len(name) for name in self.against)
        for name, reasons in self.against.items():
            mark = "->" if name == self.chosen else "no" if reasons else "ok"
            text = "; ".join(reasons) if reasons else self.notes[name]
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
    if requested != "auto":
        chosen = requested if requested in fitting else None
    else:
        chosen = next((name for name in fitting if BACKENDS[name].auto), None) or next(iter(fitting), None)
    return Explanation(problem, requested, chosen, against, notes)


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
