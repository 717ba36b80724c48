"""Registers and predicates of machine code: what an instruction reads and writes, and what is read later."""

from __future__ import annotations

import re
from functools import cache

from sass_code import Code, Instruction

_PREDICATE = re.compile(r"!?(U?P(?:\d|T))\b")
_REGISTER = re.compile(r"\bR(\d+)\b(\.64)?")

# Without a register that they write; comparisons have none either.
_NO_RESULT = ("ST", "RED", "BAR", "CCTL", "UTMA", "MEMBAR", "NANOSLEEP", "SYNCS", "WARPSYNC", "R2UR", "R2P", "EXIT")
_NO_RESULT += ("UBLK", "FCHK", "BRA", "BRX", "BREAK")
_TWO_PREDICATES = ("PLOP3", "UPLOP3", "VOTE", "VOTEU")  # their further predicates are read


def _width_read(name: str) -> int:
    """Registers of an operand that is not an address; too many rather than too few."""
    if ".128" in name or "MMA" in name or (".4" in name and name.startswith(("LDSM", "STSM"))):
        return 4
    two = (".64", "U64", "S64", ".WIDE", "IMAD.HI")
    return 2 if any(part in name for part in two) or name.startswith(("D", "LDSM", "STSM")) else 1


def _width_written(name: str) -> int:
    """Registers of a result; too few rather than too many."""
    if ".128" in name or (name.startswith("LDSM") and ".4" in name):
        return 4
    wide = (".64" in name and not name.startswith(("I2F", "F2F"))) or ".WIDE" in name
    return 2 if wide or (name.startswith("LDSM") and ".2" in name) else 1


@cache
def written(text: str) -> frozenset[int]:
    """Registers; those of products, which write theirs in order, are not looked at."""
    name, _, operands = text.partition(" ")
    first = re.match(r"\s*(?:!?U?P\w+,\s*)*R(\d+)\b", operands)
    if not first or name.startswith(_NO_RESULT) or "SETP" in name or "GMMA" in name:
        return frozenset()
    return frozenset(range(int(first[1]), int(first[1]) + _width_written(name)))


@cache
def read(text: str) -> frozenset[int]:
    """Registers."""
    name, _, operands = text.partition(" ")
    own = re.match(r"\s*(?:!?U?P\w+,\s*)*R\d+\b", operands) if written(text) else None
    found: set[int] = set()
    for register in _REGISTER.finditer(operands, own.end() if own else 0):
        before = operands[: register.start()]
        in_address = before.count("[") > before.count("]")
        width = 2 if register[2] else 1 if in_address else _width_read(name)
        found |= set(range(int(register[1]), int(register[1]) + width))
    if sums := re.search(r"GMMA\.\d+x(\d+)\S* R(\d+)", text):  # of the tensor cores of Hopper
        found |= set(range(int(sums[2]), int(sums[2]) + int(sums[1]) // 2))
    return frozenset(found)


@cache
def predicates_written(text: str) -> frozenset[str]:
    """All where that is not known."""
    name, _, operands = text.partition(" ")
    if name.startswith(("R2P", "CALL", "RET", "UR2UP")):
        return frozenset([f"{kind}{number}" for kind in ("P", "UP") for number in range(8)])
    found: list[str] = []
    results = 0
    for operand in operands.split(","):
        predicate = _PREDICATE.fullmatch(operand.strip())
        if predicate and not (name.startswith(_TWO_PREDICATES) and len(found) == 2):
            found.append(predicate[1])
        elif results or predicate or not re.match(r"\s*U?R\w+$", operand):
            break
        results += not predicate
    return frozenset(found)


def branch_told(step: Instruction, falls: bool) -> tuple[str, bool] | None:
    """What a thread's predicate is where it has branched, or fallen through; None: it tells nothing.

    BRA.U.ANY goes where any thread's predicate says so, BRA.DIV where they differ, and BRA may have a condition besides.
    """
    if step.guard is None or step.name not in ("BRA", "EXIT") or re.match(r"BRA !?U?P", step.text):
        return None
    name, value = step.guard
    return name, value != falls


def is_read_later(code: Code, at: int, register: int) -> bool:
    """Whether something after an instruction may read a register before it is written.

    What is written under a predicate is written for those that read it under the same one.
    """
    todo = [(target, frozenset[tuple[str, bool]]()) for target in code.after[at]]
    seen = set(todo)
    while todo:
        here, written_if = todo.pop()
        step = code.instructions[here]
        if register in read(step.text) and step.guard not in written_if:
            return True
        if register in written(step.text):
            if step.guard is None or (step.guard[0], not step.guard[1]) in written_if:
                continue
            written_if |= {step.guard}
        gone = predicates_written(step.text)
        written_if = frozenset(guard for guard in written_if if guard[0] not in gone)
        for target in code.after[here]:
            new = (target, written_if)
            if branch_told(step, target == here + 1) not in written_if and new not in seen:
                seen.add(new)
                todo.append(new)
    return False
