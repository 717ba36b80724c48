"""Prints one line per kernel and architecture from the log of `nvcc -Xptxas -v`: registers, stack, spills."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ENTRY = re.compile(r"Compiling entry function '(?P<kernel>\w+)' for '(?P<arch>\w+)'")
MEMORY = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")


def readable(kernels: list[str]) -> dict[str, str]:
    """Demangled names without namespaces and arguments, where c++filt exists; the mangled ones otherwise."""
    if not kernels or shutil.which("c++filt") is None:
        return {kernel: kernel for kernel in kernels}
    lines = subprocess.run(["c++filt", *kernels], capture_output=True, text=True, check=True).stdout.splitlines()
    names = (re.sub(r"\(.*$", "", line.replace("(anonymous namespace)::", "").replace("(bool)", "")) for line in lines)
    return dict(zip(kernels, (name.removeprefix("void ").replace("moeq::", "") for name in names), strict=True))


def report(log: str) -> list[str]:
    """The lines to print, in the log's order."""
    rows: list[tuple[str, str, str]] = []
    kernel, arch, memory = "", "", ""
    for line in log.splitlines():
        if found := ENTRY.search(line):
            kernel, arch = found["kernel"], found["arch"]
        elif found := MEMORY.search(line):
            stack, stores, loads = found.groups()
            memory = f"stack {stack}, spill stores {stores}, spill loads {loads}"
        elif kernel and (found := REGISTERS.search(line)):
            rows.append((kernel, arch, f"{found[1]:>3} registers, {memory}"))
            kernel = ""
    names = readable(sorted({kernel for kernel, _, _ in rows}))
    return [f"     {arch:<8} {resources}  {names[kernel]}" for kernel, arch, resources in rows]


if __name__ == "__main__":
    for line in report(Path(sys.argv[1]).read_text()):
        print(line)
