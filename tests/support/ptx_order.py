"""PTX as the steps of launch_order.py, with the parameters that addresses come from."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import NamedTuple, TypeVar

from launch_order import UNKNOWN, Order, Step, order_of

_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\(([^)]*)\)")
_LABEL = re.compile(r"([$\w]+):(?!:)\s*")
_PREDICATE = re.compile(r"@!?%?\w+\s+")
_NAME = re.compile(r"[%$A-Za-z_][\w$]*")
_BRACKETS = re.compile(r"\[([^\]]*)\]")
_NOT_GLOBAL = {"param", "param::entry", "shared", "shared::cta", "shared::cluster", "const", "local"}
_SPACES = _NOT_GLOBAL | {"global"}
T = TypeVar("T")


Scope = tuple[int, ...]  # the blocks in braces that enclose a statement; labels are known inside theirs


class _Statement(NamedTuple):
    guarded: bool
    opcode: str
    operands: str
    scope: Scope

    def text(self) -> str:
        return f"{self.opcode} {self.operands}".strip()


class _Labels(dict[tuple[Scope, str], T]):
    """What labels stand for, by their scope and name."""

    def add(self, scope: Scope, name: str, value: T) -> None:
        if (scope, name) in self:
            raise ValueError(f"label {name} stands twice")
        self[scope, name] = value

    def seen_from(self, scope: Scope, name: str) -> T:
        while scope and (scope, name) not in self:
            scope = scope[:-1]
        return self[scope, name]


class _Program:
    """Instructions, the instruction that each label stands before, and tables of labels by their own label."""

    def __init__(self, body: str) -> None:
        self.instructions: list[_Statement] = []
        self.labels = _Labels[int]()
        self.tables = _Labels[list[str]]()
        self._scope: Scope = ()
        self._blocks = 0
        for text in body.split(";"):
            self._add(text)

    def _skip_braces(self, text: str) -> str:
        """The text without what opens and closes blocks in front of it."""
        text = text.lstrip()
        while text[:1] in ("{", "}"):
            if text[0] == "{":
                self._blocks += 1
                self._scope += (self._blocks,)
            else:
                self._scope = self._scope[:-1]
            text = text[1:].lstrip()
        return text

    def _add(self, text: str) -> None:
        rest, label = self._skip_braces(text), ""
        while found := _LABEL.match(rest):
            label = found[1]
            self.labels.add(self._scope, label, len(self.instructions))
            rest = self._skip_braces(rest[found.end() :])
        if rest.startswith(".branchtargets"):
            self.tables.add(self._scope, label, _NAME.findall(rest.removeprefix(".branchtargets")))
        if rest and not rest.startswith("."):
            guard = _PREDICATE.match(rest)
            opcode, *operands = rest[guard.end() if guard else 0 :].split(maxsplit=1)
            self.instructions.append(
                _Statement(guard is not None, opcode, " ".join(" ".join(operands).split()), self._scope)
            )

    def targets(self, statement: _Statement) -> tuple[int, ...]:
        """The instructions that a branch may go to."""
        scope, names = statement.scope, [statement.operands]
        if statement.opcode.startswith("brx"):
            names = self.tables.seen_from(scope, statement.operands.split(",")[-1].strip())
        return tuple(self.labels.seen_from(scope, name) for name in names)


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
    program = _Program(body)
    origins = _origins(program.instructions, _pointers(entry[2]))
    steps = []
    for statement in program.instructions:
        guarded, opcode = statement.guarded, statement.opcode
        kind = _kind(opcode)
        targets = program.targets(statement) if opcode.startswith(("bra", "brx")) else ()
        falls = guarded or not (targets or kind == "end" or opcode == "trap")
        if guarded and kind == "wait":
            kind = ""  # some threads do not wait
        address = _address(statement, kind, origins) if kind in ("load", "store", "prefetch") else UNKNOWN
        steps.append(Step(statement.text(), kind, address, targets, falls))
    return [*steps, Step("the last instruction", "end", falls=False)]


def ptx_order(ptx: str) -> Order:
    return order_of(steps_of(ptx))
