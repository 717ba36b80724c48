"""What kernels do before they wait for the kernels in front of them, judged by the rule of docs/design.md, section 11.

A kernel is a list of steps, made from PTX (ptx_order.py) or from machine code (sass_order.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

UNKNOWN = frozenset((-1,))  # of an address that no parameter explains
_PAST_L1 = re.compile(r"ld\.\S*\b(cg|relaxed|acquire|volatile)\b")


class Step(NamedTuple):
    """One instruction. kind: "wait", "trigger", "load", "store", "prefetch", "end" (of the kernel), or "" (others).

    Loads, stores (atomics too) and prefetches are those of global memory, and of memory that may be global.
    pointers: numbers of the kernel's parameters that the address was computed from.
    targets: steps that a branch may go to; falls: whether the next step may follow.
    """

    text: str
    kind: str = ""
    pointers: frozenset[int] = UNKNOWN
    targets: tuple[int, ...] = ()
    falls: bool = True


class Order(NamedTuple):
    """early: what may run before the kernel has waited; written: the parameters that it ever stores to."""

    early: tuple[Step, ...]
    written: frozenset[int]

    def of(self, *kinds: str) -> Iterator[Step]:
        return (step for step in self.early if step.kind in kinds)


class Launch(NamedTuple):
    """A kernel with what its parameters point to: a name for each memory, the same in all launches; None: a number."""

    name: str
    order: Order
    memory: Sequence[object]


def order_of(steps: Sequence[Step]) -> Order:
    """Follows every path from the first step to a wait that no predicate guards."""
    seen: set[int] = set()
    todo = [0]
    while todo:
        at = todo.pop()
        if at in seen or steps[at].kind == "wait":
            continue
        seen.add(at)
        todo += steps[at].targets
        if steps[at].falls:
            todo.append(at + 1)
    written = frozenset(p for step in steps if step.kind == "store" for p in step.pointers)
    return Order(tuple(steps[at] for at in sorted(seen)), written)


def faults_alone(order: Order) -> list[str]:
    """Of a kernel behind any other, where nothing at all may be read early."""
    return [*_faults_always(order), *(f"reads before it waits: {step.text}" for step in order.of("load"))]


def _faults_always(order: Order) -> Iterator[str]:
    for step in order.of("end"):
        yield f"ends without having waited: {step.text}"
    for step in order.of("store"):
        yield f"writes before it waits: {step.text}"


def _why_unsettled(step: Step, launch: Launch, before: Launch | None) -> str:
    """Why the memory that an early load reads may still change, or not be there; "": it may not."""
    if step.pointers == UNKNOWN or len(step.pointers) > 1:
        return "from an address of unknown origin"
    (pointer,) = step.pointers
    what = f"parameter {pointer}"
    if before is None:
        return f"{what}, which any kernel may just be writing"
    if any(before.order.of("trigger")):
        return f"{what}, and {before.name} lets it begin before it has waited itself"
    if before.order.written >= UNKNOWN or launch.memory[pointer] in {before.memory[p] for p in before.order.written}:
        return f"{what}, which {before.name} writes"
    return "" if _PAST_L1.match(step.text) else f"{what}, from an L1 that may be stale"


def faults(launches: Sequence[Launch]) -> list[str]:
    """Of launches that follow each other; in front of the first one is any kernel."""
    found = []
    for before, launch in zip((None, *launches), launches, strict=False):
        found += [f"{launch.name} {fault}" for fault in _faults_always(launch.order)]
        for step in launch.order.of("load"):
            if why := _why_unsettled(step, launch, before):
                found.append(f"{launch.name} reads before it waits: {step.text}: {why}")
    return found
