"""A kernel's machine code as nvdisasm prints it with `-hex -gi`: what each instruction waits for, and which line made it.

An encoding has 128 bits. Of the upper 64, bits 46 to 48 name the scoreboard on which the instruction reports that its
result is there (7: none), and bits 52 to 57 those that it waits for before it is issued; nobody documents them, and
tests/backends/gpu/test_early_releases.py compiles a kernel to see that they mean this.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from paths import ROOT
from wgmma_hazards import where_to

SOURCES = ROOT / "csrc" / "cuda"
NO_SCOREBOARD = 7

_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]+)\*/\s+(.*?)\s*;\s+/\* 0x[0-9a-f]{16} \*/")
_UPPER = re.compile(r"\s*/\* 0x([0-9a-f]{16}) \*/")
_LABEL = re.compile(r"\s*(\.L_\S+|\$\S+):")
_CALL = re.compile(r"CALL\.\S+ `\((\S+)\)")
_LINE = re.compile(r'//## File "([^"]+)", line (\d+)')
_GUARD = re.compile(r"@(!?)(U?P\d)\s+")
_PREDICATE = re.compile(r"!?(U?P(?:\d|T))\b")
_REGISTER = re.compile(r"\bR(\d+)\b(\.64)?")
_FUNCTION = re.compile(r"(?:  )?(?:__\w+__|static|inline|constexpr|explicit|void|auto)\b.*?(\w+)\(")

# Without a register that they write; comparisons have none either.
_NO_RESULT = ("ST", "RED", "BAR", "CCTL", "UTMA", "MEMBAR", "NANOSLEEP", "SYNCS", "WARPSYNC", "R2UR", "R2P", "EXIT")
_NO_RESULT += ("UBLK", "FCHK", "BRA", "BRX", "BREAK")
_TWO_PREDICATES = ("PLOP3", "UPLOP3", "VOTE", "VOTEU")  # their further predicates are read


class Instruction(NamedTuple):
    """text: without its guard; guard: ("P0", True), or None; lines: nvdisasm's, of what was inlined into each other."""

    address: int
    text: str
    guard: tuple[str, bool] | None
    waits: int
    reports: int
    lines: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.text.partition(" ")[0]

    @property
    def places(self) -> tuple[str, ...]:
        """The functions of our sources that it is in, from the innermost out."""
        return tuple(dict.fromkeys(name for file, line in self._found() if (name := function_at(file, line))))

    @property
    def source(self) -> str:
        """The text of the innermost line of ours."""
        return next((_lines(file)[line - 1].strip() for file, line in self._found() if function_at(file, line)), "")

    def _found(self) -> list[tuple[str, int]]:
        places = (place for line in self.lines if (place := _LINE.search(line)))
        return [(Path(place[1]).name, int(place[2])) for place in places]


class Code(NamedTuple):
    instructions: list[Instruction]
    after: list[list[int]]  # which instructions may follow each


@cache
def _lines(name: str) -> tuple[str, ...]:
    """Of a source with this name; none where it is not one of ours."""
    found = list(SOURCES.rglob(name))
    return tuple(found[0].read_text().splitlines()) if len(found) == 1 else ()


@cache
def function_at(name: str, number: int) -> str:
    """The function, or member function, that a line is part of; "" where the file is not one of ours."""
    for line in reversed(_lines(name)[:number]):
        found = _FUNCTION.match(re.sub(r"__launch_bounds__\([^)]*\) ", "", line))
        if found and not line.endswith(";"):
            return found[1]
    return ""


def _instruction(address: str, text: str, upper: int, lines: list[str]) -> Instruction:
    guard = _GUARD.match(text)
    return Instruction(
        int(address, 16),
        text[guard.end() :] if guard else text,
        (guard[2], not guard[1]) if guard else None,
        waits=upper >> 52 & 0x3F,
        reports=upper >> 46 & 7,
        lines=tuple(lines),
    )


def read_code(sass: str) -> Code:
    """Of one kernel."""
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    lines: list[str] = []
    begun: tuple[str, str] | None = None
    fresh = True
    for line in sass.splitlines():
        if line.startswith("\t//## File"):
            lines = [line] if fresh else [*lines, line]
            fresh = False
        elif begun and (upper := _UPPER.match(line)):
            found.append(_instruction(*begun, int(upper[1], 16), lines))
            begun = None
        elif start := _INSTRUCTION.match(line):
            begun, fresh = (start[1], start[2]), True
        elif label := _LABEL.match(line):
            labels[label[1]] = len(found)
    return Code(found, _all_after(found, labels))


def _all_after(found: list[Instruction], labels: dict[str, int]) -> list[list[int]]:
    """Calls lead into functions that were not inlined, and on; those return to whoever calls them."""
    after = [_after(at, step, labels, len(found)) for at, step in enumerate(found)]
    functions = sorted(at for label, at in labels.items() if label.startswith("$"))
    callers: dict[int, list[int]] = {at: [] for at in functions}
    for at, step in enumerate(found):
        if (call := _CALL.match(step.text)) and labels.get(call[1]) in callers:
            after[at].append(labels[call[1]])
            callers[labels[call[1]]].append(at + 1)
    for at, step in enumerate(found):
        if step.name.startswith("RET"):
            after[at] += callers[max((start for start in functions if start <= at), default=functions[0])]
    return after


def _after(at: int, step: Instruction, labels: dict[str, int], count: int) -> list[int]:
    ends, names = where_to(step.text if step.guard is None else f"@P0 {step.text}")
    targets = [labels[name] for name in names if labels.get(name, count) < count]
    return targets if ends or at + 1 == count else [*targets, at + 1]


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
