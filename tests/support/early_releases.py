"""Arrivals at barriers that do not wait for what was loaded from shared memory before them, found in machine code.

An arrival says that others may write what this warp has read. Nothing makes it wait for loads in front of it that have
not brought their values yet, and a bulk copy that it allows can be there first (once_loaded in
csrc/cuda/sm90/device/async.cuh): no run shows for certain that none is. Over every path through a kernel and what it
calls, a load is under way until something waits for its scoreboard; a value that nobody reads afterwards may come when
it will. Predicates exclude no path: one lane arrives for a warp, whose other lanes have come another way.

What an arrival gives back is not in machine code. Which loads may be under way at which arrivals, as they read memory
that it does not give back, or as no run takes the path, is in early_releases_accepted.json, by the functions that the
lines of both are in: kernels have to be compiled with -lineinfo.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from sass_code import NO_SCOREBOARD, Code, Instruction, read_code
from sass_registers import is_read_later, written

ACCEPTED = Path(__file__).with_name("early_releases_accepted.json")
# Those of one unit, which answers in order: a load that reports nothing has come when the next of them has.
_IN_ORDER = re.compile(r"LDS|LDSM|SHFL|ATOMS")
_LOAD = re.compile(r"(?:LDS|LDSM|ATOMS)\S* (?:PT, )?R\d")
_WAIT_FOR_ALL = re.compile(r"DEPBAR\.LE SB(\d), 0x0")


class Pending(NamedTuple):
    """A load under way."""

    at: int
    scoreboard: int


State = frozenset[Pending]  # before an instruction, on some path to it


class EarlyRelease(NamedTuple):
    """An arrival, and a load that it does not wait for."""

    arrival: Instruction
    load: Instruction

    def __str__(self) -> str:
        return f"{self.arrival} does not wait for {self.load}"


class Accepted(NamedTuple):
    """arrival, load: "inner < outer", the innermost functions of the two; of any where empty.

    The innermost may be "function: part": its line has that part.
    """

    arrival: str
    load: str
    because: str

    def covers(self, release: EarlyRelease) -> bool:
        return _is_at(release.arrival, self.arrival) and _is_at(release.load, self.load)


def _is_at(step: Instruction, where: str) -> bool:
    inner, *outer = where.split(" < ")
    if not where:
        return True
    return bool(step.places) and step.places[0].is_at(inner) and list(step.functions[1 : 1 + len(outer)]) == outer


def _issue(at: int, step: Instruction, state: State) -> State:
    """After an instruction."""
    is_load = step.name.startswith(("LDS", "ATOMS")) and _LOAD.match(step.text) is not None
    if not state and not is_load:
        return state
    pending = _still_pending(step, state)
    if step.reports != NO_SCOREBOARD and _IN_ORDER.match(step.text):
        pending = frozenset(
            load._replace(scoreboard=step.reports) if load.scoreboard == NO_SCOREBOARD else load for load in pending
        )
    return pending | {Pending(at, step.reports)} if is_load else pending


def _still_pending(step: Instruction, pending: State) -> State:
    """When an instruction is issued."""
    done = {n for n in range(6) if step.waits >> n & 1}
    if (found := _WAIT_FOR_ALL.match(step.text)) and step.guard is None:
        done.add(int(found[1]))
    return frozenset(load for load in pending if load.scoreboard not in done) if done and pending else pending


def _block_ends(code: Code) -> dict[int, int]:
    """{first instruction of a block: last one}: nothing else is jumped to, and nothing else jumps."""
    count = len(code.instructions)
    jumps = [at for at in range(count) if code.after[at] != [at + 1]]
    starts = sorted({0, *(target for at in jumps for target in (*code.after[at], at + 1) if target < count)})
    return {start: end - 1 for start, end in zip(starts, [*starts[1:], count], strict=True)}


def _states(code: Code) -> dict[int, State]:
    """Before the first instruction of every block that somebody comes to."""
    ends, states = _block_ends(code), dict[int, State]()
    todo: list[tuple[int, State]] = [(0, frozenset())]
    while todo:
        start, state = todo.pop()
        met = state | states.get(start, frozenset())
        if start in states and met == states[start]:
            continue
        states[start] = met
        for at in range(start, ends[start] + 1):
            met = _issue(at, code.instructions[at], met)
        todo += [(target, met) for target in code.after[ends[start]]]
    return states


def find_early_releases(sass: str) -> list[EarlyRelease]:
    """Of one kernel, accepted or not."""
    if "SYNCS.ARRIVE" not in sass:
        return []
    code = read_code(sass)
    ends = _block_ends(code)
    found: list[EarlyRelease] = []
    arrivals = [step.name.startswith("SYNCS.ARRIVE") for step in code.instructions]
    for start, state in sorted(_states(code).items()):
        for at in range(start, ends[start] + 1):
            step = code.instructions[at]
            if arrivals[at]:
                found += _early(code, at, _still_pending(step, state))
                arrivals[at] = False
            state = _issue(at, step, state)
    if any(arrivals):
        raise ValueError(f"no path leads to {code.instructions[arrivals.index(True)].text}: is a call not followed?")
    return found


def _early(code: Code, at: int, pending: State) -> list[EarlyRelease]:
    """Of an arrival: those of the loads under way that bring what is read later."""
    loads = (code.instructions[load] for load in sorted({load.at for load in pending}))
    return [
        EarlyRelease(code.instructions[at], load)
        for load in loads
        if any(is_read_later(code, at, register) for register in written(load.text))
    ]


@cache
def accepted() -> tuple[Accepted, ...]:
    return tuple(Accepted(**entry) for entry in json.loads(ACCEPTED.read_text())["accepted"])


def faults(sass: str) -> list[EarlyRelease]:
    """Of one kernel: early releases that no entry accepts."""
    return [release for release in find_early_releases(sass) if not any(entry.covers(release) for entry in accepted())]
