"""Arrivals at barriers that do not wait for what was loaded from shared memory before them, found in machine code.

An arrival says that others may write what this warp has read. Nothing makes it wait for loads in front of it that have
not brought their values yet, and a bulk copy that it allows can be there first (once_loaded in
csrc/cuda/sm90/device/async.cuh): no run shows for certain that none is. Over every path through a kernel, a load is
under way until something waits for its scoreboard; a value that nobody reads afterwards may come when it will.

What an arrival gives back is not in machine code. Which loads may be under way at which arrivals, as they read memory
that it does not give back, or as no path leads from one to the other, is in early_releases_accepted.json, by the
functions that the lines of both are in: kernels have to be compiled with -lineinfo.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from sass_code import (
    NO_SCOREBOARD,
    Code,
    Instruction,
    branch_told,
    is_read_later,
    predicates_written,
    read_code,
    written,
)

ACCEPTED = Path(__file__).with_name("early_releases_accepted.json")
# Those of one unit, which answers in order: a load that reports nothing has come when the next of them has.
_IN_ORDER = re.compile(r"LDS|LDSM|SHFL|ATOMS")
_LOAD = re.compile(r"(?:LDS|LDSM)\S* R\d")
_WAIT_FOR_ALL = re.compile(r"DEPBAR\.LE SB(\d), 0x0")

Facts = frozenset[tuple[str, bool]]  # what predicates are


class Pending(NamedTuple):
    """A load under way. known: what held where it was issued, and has not been written since."""

    at: int
    scoreboard: int
    known: Facts


class State(NamedTuple):
    """Before an instruction. known: on every path to it; pending: on some."""

    known: Facts
    pending: frozenset[Pending]


class EarlyRelease(NamedTuple):
    """kernel code: address and places of an arrival, and of a load that it does not wait for."""

    arrival: Instruction
    load: Instruction

    def __str__(self) -> str:
        sides = (f"{hex(i.address)} {i.text} ({' < '.join(i.places) or 'no line'})" for i in self)
        return " does not wait for ".join(sides)


class Accepted(NamedTuple):
    """arrival, load: "inner < outer", functions that follow each other in the places of the two."""

    arrival: str
    load: str
    because: str

    def covers(self, release: EarlyRelease) -> bool:
        return all(
            f" < {part} < " in f" < {' < '.join(step.places)} < "
            for part, step in ((self.arrival, release.arrival), (self.load, release.load))
        )


def _contradict(one: Facts, other: Facts) -> bool:
    return any((name, not value) in other for name, value in one)


def _issue(at: int, step: Instruction, state: State) -> State:
    """After an instruction, whatever follows it."""
    if not state.pending and not _LOAD.match(step.text) and not predicates_written(step.text):
        return state
    pending = _still_pending(step, state.pending)
    if step.reports != NO_SCOREBOARD and _IN_ORDER.match(step.text):
        pending = frozenset(
            load._replace(scoreboard=step.reports) if load.scoreboard == NO_SCOREBOARD else load for load in pending
        )
    own = frozenset() if step.guard is None else frozenset([step.guard])
    if _LOAD.match(step.text) and not _contradict(own, state.known):
        pending |= {Pending(at, step.reports, state.known | own)}
    gone = predicates_written(step.text)
    if not gone:
        return State(state.known, pending)
    left = lambda facts: frozenset(fact for fact in facts if fact[0] not in gone)  # noqa: E731
    return State(left(state.known), frozenset(load._replace(known=left(load.known)) for load in pending))


def _still_pending(step: Instruction, pending: frozenset[Pending]) -> frozenset[Pending]:
    """When an instruction is issued."""
    done = {n for n in range(6) if step.waits >> n & 1}
    if found := _WAIT_FOR_ALL.match(step.text):
        done.add(int(found[1]))
    return frozenset(load for load in pending if load.scoreboard not in done) if done and pending else pending


def _with(state: State, fact: tuple[str, bool] | None) -> State | None:
    """Where a branch has told what a predicate is; None: nobody comes this way."""
    if fact is None:
        return state
    facts: Facts = frozenset([fact])
    if _contradict(facts, state.known):
        return None
    pending = (load for load in state.pending if not _contradict(facts, load.known))
    return State(state.known | facts, frozenset(load._replace(known=load.known | facts) for load in pending))


def _leaves(code: Code, at: int, state: State) -> list[tuple[int, State]]:
    step = code.instructions[at]
    reached = ((target, _with(state, branch_told(step, target == at + 1))) for target in code.after[at])
    return [(target, left) for target, left in reached if left is not None]


def _meet(one: State, other: State) -> State:
    return State(one.known & other.known, _weakest(one.pending | other.pending))


def _weakest(pending: frozenset[Pending]) -> frozenset[Pending]:
    """Without those that are under way in no case but the ones that another covers."""
    by_load: dict[tuple[int, int], list[Facts]] = {}
    for load in pending:
        by_load.setdefault((load.at, load.scoreboard), []).append(load.known)
    return frozenset(
        Pending(*key, known)
        for key, all_known in by_load.items()
        for known in all_known
        if not any(other < known for other in all_known)
    )


def _states(code: Code) -> list[State | None]:
    """Before every instruction; None: nobody comes there."""
    states: list[State | None] = [None] * len(code.instructions)
    todo = [(0, State(frozenset(), frozenset()))] if states else []
    while todo:
        at, state = todo.pop()
        old = states[at]
        met = state if old is None else _meet(old, state)
        if met != old:
            states[at] = met
            todo += _leaves(code, at, _issue(at, code.instructions[at], met))
    return states


def find_early_releases(sass: str) -> list[EarlyRelease]:
    """Of one kernel, accepted or not."""
    if "SYNCS.ARRIVE" not in sass:
        return []
    code = read_code(sass)
    found: list[EarlyRelease] = []
    for at, (step, state) in enumerate(zip(code.instructions, _states(code), strict=True)):
        if state is None or not step.name.startswith("SYNCS.ARRIVE"):
            continue
        for load in sorted({load.at for load in _still_pending(step, state.pending)}):
            text = code.instructions[load].text
            if any(is_read_later(code, at, register) for register in written(text)):
                found.append(EarlyRelease(step, code.instructions[load]))
    return found


@cache
def accepted() -> tuple[Accepted, ...]:
    return tuple(Accepted(**entry) for entry in json.loads(ACCEPTED.read_text())["accepted"])


def faults(sass: str) -> list[EarlyRelease]:
    """Of one kernel: early releases that no entry accepts."""
    return [release for release in find_early_releases(sass) if not any(entry.covers(release) for entry in accepted())]
