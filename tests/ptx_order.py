"""PTX as the steps of launch_order.py, with the parameters that addresses come from."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import NamedTuple

from launch_order import UNKNOWN, Order, Step, order_of

_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\(([^)]*)\)")
_LABEL = re.compile(r"([$\w]+):(?!:)\s*")
_PREDICATE = re.compile(r"@!?%?\w+\s+")
_NAME = re.compile(r"[%$A-Za-z_][\w$]*")
_BRACKETS = re.compile(r"\[([^\]]*)\]")
_NOT_GLOBAL = {"param", "param::entry", "shared", "shared::cta", "shared::cluster", "const", "local"}
_SPACES = _NOT_GLOBAL | {"global"}


class _Statement(NamedTuple):
    guarded: bool
    opcode: str
    operands: str

    def text(self) -> str:
        return f"{self.opcode} {self.operands}".strip()


def _statements(body: str) -> tuple[list[_Statement], dict[str, int], dict[str, list[str]]]:
    """Instructions; the instruction that each label stands before; tables of labels by their own label."""
    instructions: list[_Statement] = []
    labels: dict[str, int] = {}
    tables: dict[str, list[str]] = {}
    for text in body.split(";"):
        rest = text.lstrip("{} \t\n")
        label = ""
        while found := _LABEL.match(rest):
            label = found[1]
            if label in labels:
                raise ValueError(f"label {label} stands twice")
            labels[label] = len(instructions)
            rest = rest[found.end() :].lstrip("{} \t\n")
        if rest.startswith(".branchtargets"):
            tables[label] = _NAME.findall(rest.removeprefix(".branchtargets"))
        if not rest or rest.startswith("."):
            continue
        guard = _PREDICATE.match(rest)
        opcode, _, operands = rest[guard.end() if guard else 0 :].partition(" ")
        opcode, _, more = opcode.partition("\t")
        instructions.append(_Statement(guard is not None, opcode.strip(), " ".join(f"{more} {operands}".split())))
    return instructions, labels, tables


def _kind(opcode: str) -> str:
    """Of Step; a call, of which nothing is known, may write."""
    head, *parts = opcode.split(".")
    spaces = [part for part in parts if part in _SPACES]
    if head == "griddepcontrol":
        return "wait" if parts == ["wait"] else "trigger"
    if head in ("ret", "exit"):
        return "end"
    if head in ("prefetch", "prefetchu", "applypriority") or opcode.startswith("cp.async.bulk.prefetch"):
        return "prefetch"
    if head in ("cp", "cp.reduce"):
        return "store" if spaces[:1] == ["global"] else "load" if "global" in spaces else ""
    if head in ("ld", "ldu", "tex", "suld"):
        return "" if _NOT_GLOBAL.intersection(parts) else "load"
    if head in ("st", "atom", "red", "discard", "multimem", "sust", "tensormap", "call"):
        return "" if _NOT_GLOBAL.intersection(parts) else "store"
    return ""


def _pointers(header: str) -> dict[str, int]:
    """Numbers of the parameters that are pointers, by their names."""
    declared = [line.split() for line in header.split(",") if line.split()]
    return {words[-1].partition("[")[0]: i for i, words in enumerate(declared) if {".u64", ".b64"}.intersection(words)}


def _split(operands: str) -> tuple[list[str], list[str]]:
    """Names in the first operand, which may be several in braces, and in the others."""
    first = re.match(r"\s*(\{[^}]*\}|\[[^\]]*\]|[^,]*)", operands)
    assert first is not None
    return _NAME.findall(first[1]), _NAME.findall(operands[first.end() :])


def _origins(instructions: list[_Statement], pointers: dict[str, int]) -> dict[str, frozenset[int]]:
    """The pointers that each register was computed from, whatever the path; values from memory come from none."""
    makes: dict[str, set[str]] = defaultdict(set)
    for statement in instructions:
        head = statement.opcode.partition(".")[0]
        from_memory = head in ("ld", "ldu", "atom", "tex") and not statement.opcode.startswith("ld.param")
        if from_memory or head in ("st", "red", "bra", "brx"):
            continue
        made, used = _split(statement.operands)
        for name in used:
            makes[name].update(made)
    origins: dict[str, set[int]] = defaultdict(set)
    for pointer, number in pointers.items():
        todo = [pointer]
        while todo:
            name = todo.pop()
            if number not in origins[name]:
                origins[name].add(number)
                todo += makes[name]
    return {name: frozenset(numbers) for name, numbers in origins.items()}


def _address(statement: _Statement, kind: str, origins: dict[str, frozenset[int]]) -> frozenset[int]:
    """The origins of the address in global memory."""
    brackets = _BRACKETS.findall(statement.operands)
    if not brackets:
        return UNKNOWN
    which = 1 if kind == "load" and len(brackets) > 1 else 0  # of a copy: what it reads
    return frozenset().union(*(origins.get(name, ()) for name in _NAME.findall(brackets[which]))) or UNKNOWN


def steps_of(ptx: str) -> list[Step]:
    """Of the only kernel in a module."""
    text = re.sub(r"//.*|^\s*\.(loc|file)\b.*$", "", ptx.partition("\n\t.section")[0], flags=re.MULTILINE)
    (entry,) = _ENTRY.finditer(text)
    body = text[text.index("{", entry.end()) : text.rindex("}")]
    instructions, labels, tables = _statements(body)
    origins = _origins(instructions, _pointers(entry[2]))
    steps = []
    for statement in instructions:
        guarded, opcode, operands = statement
        kind, targets = _kind(opcode), ()
        if opcode.startswith("bra"):
            targets = (labels[operands],)
        elif opcode.startswith("brx"):
            targets = tuple(labels[name] for name in tables[operands.split(",")[-1].strip()])
        falls = guarded or not (targets or kind == "end" or opcode == "trap")
        if guarded and kind == "wait":
            kind = ""  # some threads do not wait
        address = _address(statement, kind, origins) if kind in ("load", "store", "prefetch") else UNKNOWN
        steps.append(Step(statement.text(), kind, address, targets, falls))
    return [*steps, Step("the last instruction", "end", falls=False)]


def ptx_order(ptx: str) -> Order:
    return order_of(steps_of(ptx))
