"""Machine code as nvdisasm prints it: instructions and which may follow each; with `-hex -gi` also what each waits for, and
which line made it.

An encoding has 128 bits. Of the upper 64, bits 46 to 48 name the scoreboard on which the instruction reports that its
result is there (7: none), and bits 52 to 57 those that it waits for before it is issued; nobody documents them, and
tests/backends/gpu/test_early_releases.py compiles a kernel to see that they mean this.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from modules_by_path import load

source_places = load("scripts/source_places.py")
NO_SCOREBOARD = 7

_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]+)\*/\s+(.*?)\s*;")
_UPPER = re.compile(r"\s*/\* 0x([0-9a-f]{16}) \*/")
_LABEL = re.compile(r"\s*(\.L_\S+|\$\S+):")
_CALL = re.compile(r"CALL\.\S+ `\((\S+)\)")
_LINE = re.compile(r'//## File "([^"]+)", line (\d+)')
_GUARD = re.compile(r"@(!?)(U?P\d)\s+")
_BRANCH = re.compile(r"BRA\b.*`\((\.L_\S+)\)")
_TABLE = re.compile(r"BRXU?\b.*BRANCH_TARGETS ([^\"]+)\"")
_NEVER_FALLS = re.compile(r"(?:EXIT|BRXU?|RET)\b|BRA `")  # BRA.DIV and the like branch on what no predicate shows


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
    def functions(self) -> tuple[str, ...]:
        """Those of our sources that it is in, from the innermost out."""
        return tuple(dict.fromkeys(place.function for place in self.places))

    @property
    def places(self) -> list[Any]:
        """Lines of our sources: those that were inlined into each other."""
        lines = (line for text in self.lines if (line := _LINE.search(text)))
        places = (source_places.place_of(line[1], int(line[2])) for line in lines)
        return [place for place in places if place.function]

    def __str__(self) -> str:
        return f"{hex(self.address)} {self.text} ({' < '.join(self.functions) or 'no line'})"


class Code(NamedTuple):
    """Of one kernel."""

    instructions: list[Instruction]
    after: list[list[int]]  # which instructions may follow each


def _instruction(address: str, text: str, lines: tuple[str, ...]) -> Instruction:
    guard = _GUARD.match(text) if text[0] == "@" else None
    if guard is None:
        return Instruction(int(address, 16), text, None, 0, NO_SCOREBOARD, lines)
    return Instruction(int(address, 16), text[guard.end() :], (guard[2], not guard[1]), 0, NO_SCOREBOARD, lines)


def _encoded(step: Instruction, upper: int) -> Instruction:
    return Instruction(*step[:3], upper >> 52 & 0x3F, upper >> 46 & 7, step.lines)


@lru_cache(maxsize=1)  # who judges a kernel reads it, one after the other
def read_code(sass: str) -> Code:
    """Of one kernel. Without encodings nothing waits, and nothing reports."""
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    lines: tuple[str, ...] = ()
    fresh = True
    for line in sass.splitlines():
        if line.startswith("\t//## File"):
            lines = (line,) if fresh else (*lines, line)
            fresh = False
        elif start := _INSTRUCTION.match(line):
            fresh = True
            found.append(_instruction(start[1], start[2], lines))
        elif upper := _UPPER.match(line):
            found[-1] = _encoded(found[-1], int(upper[1], 16))
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
            before = [start for start in functions if start <= at]
            after[at] += callers[before[-1]] if before else []
    return after


def _after(at: int, step: Instruction, labels: dict[str, int], count: int) -> list[int]:
    falls = [at + 1] if at + 1 < count else []
    if not step.text.startswith(("BR", "EXIT", "RET")):
        return falls
    branch, table = _BRANCH.match(step.text), _TABLE.match(step.text)
    names = table[1].split(",") if table else [branch[1]] if branch else []
    targets = [labels[name] for name in names if labels.get(name, count) < count]
    ends = step.guard is None and _NEVER_FALLS.match(step.text)
    return targets if ends else [*targets, *falls]


def tool(name: str) -> Path:
    """A binary utility of CUDA that comes with Triton: nvdisasm, cuobjdump."""
    import triton

    return Path(triton.__file__).parent / "backends/nvidia/bin" / name


def disassemble(cubin: bytes, folder: Path) -> str:
    """SASS of a kernel."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    return subprocess.run([tool("nvdisasm"), "-c", file], capture_output=True, text=True, check=True).stdout


def disassembled(binary: Path, folder: Path, *options: str) -> Iterator[tuple[str, str]]:
    """(name, SASS) of every kernel in an object or a shared library; folder: an empty one, for what lies in it.

    options: of nvdisasm: -hex, encodings; -gi, lines of the sources, where they were compiled with -lineinfo.
    """
    subprocess.run([tool("cuobjdump"), "-xelf", "all", binary.resolve()], cwd=folder, capture_output=True, check=True)
    for cubin in sorted(folder.glob("*.cubin")):
        # With encodings most of what it prints is spaces, hundreds of megabytes.
        with subprocess.Popen([tool("nvdisasm"), *options, "-c", cubin], stdout=subprocess.PIPE) as printed:
            squeezed = subprocess.run(
                ["tr", "-s", " "], stdin=printed.stdout, capture_output=True, text=True, check=True
            )
        if printed.returncode:
            raise RuntimeError(f"nvdisasm cannot read {cubin}: exit status {printed.returncode}")
        sass = squeezed.stdout
        for section in re.split(r"\n[ \t]*\.section[ \t]+\.text\.", sass)[1:]:
            yield section.split(",")[0], section
