"""Places in csrc/cuda by function and text, which stay what they are when lines move: "function: part of the line"."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).resolve().parent.parent / "csrc" / "cuda"
_NO_FUNCTION = re.compile(r"\W|template\b|namespace\b|struct\b|using\b|static_assert\b|extern\b|asm\b")
_MEMBER = re.compile(r"  (?:__\w+__|static|constexpr|explicit)\b")


class Place(NamedTuple):
    """A line: the function that it is in, and its text; both empty where it is not in csrc/cuda."""

    function: str = ""
    text: str = ""

    def is_at(self, where: str) -> bool:
        """where: "function", or "function: part of the line"."""
        function, _, part = where.partition(": ")
        return self.function == function and part in self.text


def function_at(lines: tuple[str, ...] | list[str], number: int) -> str:
    """The function that line `number` (from 1) is part of: named by the last line before that begins one."""
    for line in reversed(lines[:number]):
        found = re.search(r"(\w+)\(", re.sub(r"__launch_bounds__\([^)]*\) ", "", line))
        begins = (_MEMBER.match(line) and not line.endswith(";")) or not _NO_FUNCTION.match(line)
        if found and begins:
            return found[1]
    return ""


@cache
def lines_of(name: str) -> tuple[str, ...]:
    """Of the one source with this name; none where there is none."""
    found = list(SOURCES.rglob(name))
    return tuple(found[0].read_text().splitlines()) if len(found) == 1 else ()


@cache
def place_of(file: str, number: int) -> Place:
    """file: a path, of which the name counts."""
    lines = lines_of(Path(file).name)
    return Place(function_at(lines, number), lines[number - 1].strip()) if 0 < number <= len(lines) else Place()
