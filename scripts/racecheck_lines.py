"""Adds lines of csrc/cuda to a log of racecheck of kernels that were built without MOEQ_LINEINFO=1.

    python scripts/racecheck_lines.py LOG OBJECT ... > LOG_WITH_LINES

OBJECT: of the same sources by the same nvcc with -lineinfo, which adds lines to the same machine code (cubins count,
too). An access is found by its kernel and its offset there. Needs cuobjdump, nvdisasm and c++filt in PATH (Triton
brings the first two).
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

Lines = dict[str, dict[int, str]]  # kernel, as `name_of` has it -> offset -> "file:line"
_SECTION = re.compile(r"\.text\.(\S+):")
_PLACE = re.compile(r'\s*//## File "([^"]+)", line (\d+)')
_INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s")
_ACCESS = re.compile(
    r"(?P<head>(?:Read|Write) access at )(?P<code>.+)\+0x(?P<at>[0-9a-f]+)(?P<tail>(?: \[\d+ hazards?\])?)$"
)
_CLONE = re.compile(r"\[clone (.*?\))\] ")


def name_of(kernel: str) -> str:
    """A demangled name, alike from compute-sanitizer and from c++filt."""
    text = kernel.replace("(anonymous namespace)", "<unnamed>").replace("(int)", "")
    return text.replace("(bool)1", "true").replace("(bool)0", "false").replace(" ", "")


def lines_of(disassembly: Iterable[str]) -> Lines:
    """Of what `nvdisasm -g -c` prints; kernels are mangled."""
    found: Lines = {}
    kernel, place = "", ""
    for line in disassembly:
        if section := _SECTION.match(line):
            kernel, place = section[1], ""
            found[kernel] = {}
        elif named := _PLACE.match(line):
            place = f"{Path(named[1]).name}:{named[2]}"
        elif kernel and place and (instruction := _INSTRUCTION.match(line)):
            found[kernel][int(instruction[1], 16)] = place
    return found


def with_lines(log: str, lines: Lines) -> str:
    """The log with a line behind every access that is known. A function that is not inlined is part of its kernel."""
    return "\n".join(_with_line(line, lines) for line in log.splitlines()) + "\n"


def _with_line(line: str, lines: Lines) -> str:
    access = _ACCESS.search(line)
    if access is None:
        return line
    clone = _CLONE.match(access["code"])
    of_kernel = lines.get(name_of(clone[1] if clone else access["code"]), {})
    place = of_kernel.get(int(access["at"], 16))
    if place is None:
        return line
    code = f"{access['head']}{access['code']}+0x{access['at']}"
    return f"{line[: access.start()]}{code} in {place}{access['tail']}"


def _run(*command: str, folder: str | None = None) -> str:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


def of_object(path: Path) -> Lines:
    with tempfile.TemporaryDirectory() as folder:
        if path.suffix != ".cubin":
            _run("cuobjdump", "-xelf", "all", str(path.resolve()), folder=folder)
        cubins = [path] if path.suffix == ".cubin" else sorted(Path(folder).glob("*.cubin"))
        found: Lines = {}
        for cubin in cubins:
            found |= lines_of(_run("nvdisasm", "-g", "-c", str(cubin)).splitlines())
    names = _run("c++filt", *found).splitlines() if found else []
    return {name_of(name): found[mangled] for name, mangled in zip(names, found, strict=True)}


def main(log: str, *objects: str) -> int:
    lines: Lines = {}
    for path in objects:
        lines |= of_object(Path(path))
    print(with_lines(Path(log).read_text(), lines), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
