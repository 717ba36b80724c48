"""Registers that a Hopper tensor core may still be reading while something else writes them, found in machine code.

`wgmma` reads its first operand, where that is in registers, some time after it was issued. Until WARPGROUP.DEPBAR
has waited for it, nobody may write those registers. No test that runs a kernel finds a violation for certain: whether
the tensor core is late depends on what else the GPU does.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]+)\*/\s+(.*?);")
_LABEL = re.compile(r"\s*(\.L_\S+):")
PRODUCT = re.compile(r"\b[HQI]GMMA\S*\s+R(\d+), (?:R(\d+)|gdesc)")
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)")
_BRANCH = re.compile(r"\bBRA\b.*`\((\.L_\S+)\)")
_TABLE = re.compile(r"\bBRXU?\b.*BRANCH_TARGETS ([^\"]+)\"")
_NEVER_FALLS = re.compile(r"(?:EXIT|BRXU?|RET)\b|BRA `")  # BRA.DIV and the like branch on what no predicate shows
_FIRST_OPERAND = re.compile(r"^(?:@!?U?P\w+\s+)?(\S+)\s+(?:!?U?P\w+,\s*)*R(\d+)\b")
_NO_DESTINATION = ("ST", "RED", "BAR", "LDGSTS", "CCTL", "HGMMA", "QGMMA", "IGMMA", "R2UR", "UTMA", "ATOMS")
OPERAND_REGISTERS = 4  # of a thread, for one instruction


class Product(NamedTuple):
    """A product in flight. first: register of its first operand, None: in shared memory; ends: the last of a group."""

    address: int
    first: int | None
    ends: bool


class Hazard(NamedTuple):
    address: int
    instruction: str
    product: Product


def parse(sass: str) -> tuple[list[tuple[int, str]], dict[str, int]]:
    """Instructions with their addresses, and the index that each label stands before."""
    instructions: list[tuple[int, str]] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if line.startswith(("\t//##", " /* 0x")):  # where it comes from, and the second half of an encoding
            continue
        if found := _INSTRUCTION.match(line):
            instructions.append((int(found[1], 16), found[2].strip()))
        elif found := _LABEL.match(line):
            labels[found[1]] = len(instructions)
    return instructions, labels


def written(instruction: str) -> range:
    """The registers that an instruction writes itself; products write theirs in order, and are not looked at."""
    found = _FIRST_OPERAND.match(instruction)
    if not found or found[1].startswith(_NO_DESTINATION):
        return range(0)
    name, first = found[1], int(found[2])
    width = 4 if ".128" in name or name.endswith("M88.4") else 2 if ".64" in name or ".WIDE" in name else 1
    return range(first, first + width)


def _after_wait(flying: tuple[Product, ...], groups: int) -> tuple[Product, ...]:
    """What is left when at most the last `groups` groups are."""
    ends = [i for i, product in enumerate(flying) if product.ends]
    return flying if len(ends) <= groups else flying[ends[len(ends) - groups - 1] + 1 :]


def where_to(instruction: str) -> tuple[bool, list[str]]:
    """Whether what follows is not reached from here, and the labels that may be."""
    if not any(part in instruction for part in ("BR", "EXIT", "RET")):
        return False, []
    branch, table = _BRANCH.search(instruction), _TABLE.search(instruction)
    ends = _NEVER_FALLS.match(instruction) is not None
    return ends, table[1].split(",") if table else [branch[1]] if branch else []


def count_products(sass: str) -> int:
    """Products whose first operand is in registers."""
    return sum(1 for _, text in parse(sass)[0] if (found := PRODUCT.search(text)) and found[2])


def find_hazards(sass: str) -> list[Hazard]:
    """Writes to operands of products in flight, over every path through one kernel."""
    instructions, labels = parse(sass)
    targets = set(labels.values())
    hazards: set[Hazard] = set()
    seen: set[tuple[int, tuple[Product, ...]]] = set()
    todo: list[tuple[int, tuple[Product, ...]]] = [(0, ())]
    while todo:
        at, flying = todo.pop()
        while at < len(instructions) and (at not in targets or (at, flying) not in seen):
            if at in targets:
                seen.add((at, flying))
            address, text = instructions[at]
            if found := PRODUCT.search(text):
                flying = (*flying, Product(address, int(found[2]) if found[2] else None, "gsb0" in text))
            elif found := _WAIT.search(text):
                flying = _after_wait(flying, int(found[1], 16))
            else:
                touched = written(text)
                for product in flying:
                    first = product.first
                    if first is not None and any(first <= r < first + OPERAND_REGISTERS for r in touched):
                        hazards.add(Hazard(address, text, product))
            ends, next_labels = where_to(text)
            todo += [(labels[label], flying) for label in next_labels if label in labels]
            if ends:
                break
            at += 1
    return sorted(hazards)


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


def kernels(library: Path, folder: Path) -> list[tuple[str, str]]:
    """(name, SASS) of the kernels in a shared library that multiply by wgmma."""
    return [(name, sass) for name, sass in disassembled(library, folder) if PRODUCT.search(sass)]
