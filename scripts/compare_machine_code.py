"""Whether kernels are the same machine code before and after a change of sources: what may be merged without a timing.

    python scripts/compare_machine_code.py BEFORE AFTER [--arch 90] [--nvdisasm PATH] [--rename OLD=NEW ...]

BEFORE and AFTER: objects or shared libraries, or folders of them; it does not matter which file has which kernel. Of
every kernel are compared, byte by byte: instructions with their scheduling, tables that branches read, the sizes of
parameters, of shared memory and of the stack, registers, and the names of what its instructions refer to. Names are
compared without the number that an anonymous namespace gets from its file. --rename: in mangled names of BEFORE, with
the length, as 3run=6finish.

A kernel that differs is named. With nvdisasm it is also told how far: `places` means that nothing differs but where the
module keeps variables and texts, which depends on what else is in its file; `registers`, that the same instructions
stand in the same order, but for the numbers of registers; else the number of lines that differ, which fails.
"""

from __future__ import annotations

import argparse
import difflib
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import thin_fatbins

TEXT = ".text."
KEPT = ("text", "nv.constant0", "nv.constant2", "nv.constant3", "rela.text", "rela.nv.constant2")
SECTION = struct.Struct("<IIQQQQIIQQ")
SYMBOL = struct.Struct("<IBBHQQ")
RELOCATION = struct.Struct("<QQq")
NO_BITS, SYMBOLS, RELOCATIONS = 8, 2, 4
RESERVED = 1024  # of shared memory, by CUDA; which of the kernels of a file say so depends on the others
REGISTERS, FRAME = 0x2F, 0x11  # of .nv.info: (symbol, number)
SIZED = 4  # the form of its entries that say their size
ALIKE = ("places", "registers (")
ANONYMOUS = re.compile(r"(\d\d)(?=_GLOBAL__N__)")  # two digits of its length: others may be of the name before


class Kernel(NamedTuple):
    name: str
    parts: dict[str, object]  # what is compared
    cubin: bytes  # where it comes from
    mangled: str


class Section(NamedTuple):
    name: str
    kind: int
    data: bytes
    size: int
    link: int


def plain(name: str) -> str:
    """A mangled name without what tells anonymous namespaces apart."""
    while found := ANONYMOUS.search(name):
        name = f"{name[: found.start()]}A{name[found.end() + int(found[1]) :]}"
    return name


def sections(cubin: bytes) -> list[Section]:
    (table,), (count, names) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<HH", cubin, 60)
    heads = [SECTION.unpack_from(cubin, table + i * SECTION.size) for i in range(count)]
    texts = cubin[heads[names][4] :]
    found = []
    for name, kind, _, _, begin, size, link, *_ in heads:
        data = b"" if kind == NO_BITS else cubin[begin : begin + size]
        found.append(Section(text_at(texts, name), kind, data, size, link))
    return found


def text_at(texts: bytes, begin: int) -> str:
    return texts[begin : texts.index(b"\0", begin)].decode()


def symbol_names(of_cubin: list[Section]) -> list[str]:
    table = next(s for s in of_cubin if s.kind == SYMBOLS)
    return [plain(text_at(of_cubin[table.link].data, name)) for name, *_ in SYMBOL.iter_unpack(table.data)]


def numbers(info: bytes, wanted: int, symbols: list[str]) -> dict[str, int]:
    """By symbol, from the module's .nv.info."""
    found, at = {}, 0
    while at + 4 <= len(info):
        form, what, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == SIZED:
            if what == wanted:
                symbol, number = struct.unpack_from("<II", info, at)
                found[symbols[symbol]] = number
            at += size
    return found


def relocations(section: Section, symbols: list[str]) -> list[tuple[int, int, str, int]]:
    return [(at, info & 0xFFFFFFFF, symbols[info >> 32], add) for at, info, add in RELOCATION.iter_unpack(section.data)]


def kernels_of(cubin: bytes) -> Iterator[Kernel]:
    all_sections = sections(cubin)
    symbols = symbol_names(all_sections)
    by_name = {s.name: s for s in all_sections}
    info = by_name[".nv.info"].data if ".nv.info" in by_name else b""
    registers, frames = numbers(info, REGISTERS, symbols), numbers(info, FRAME, symbols)
    for section in all_sections:
        if not section.name.startswith(TEXT):
            continue
        mangled = section.name.removeprefix(TEXT)
        shared = by_name.get(f".nv.shared.{mangled}")
        parts: dict[str, object] = {
            "registers": registers.get(plain(mangled)),
            "frame": frames.get(plain(mangled)),
            "shared": max(shared.size, RESERVED) if shared else RESERVED,
        }
        for kept in KEPT:
            part = by_name.get(f".{kept}.{mangled}")
            if part is not None:
                parts[kept] = relocations(part, symbols) if part.kind == RELOCATIONS else part.data
        yield Kernel(plain(mangled), parts, cubin, mangled)


def cubins(path: Path, arch: int) -> Iterator[bytes]:
    data = path.read_bytes()
    for entries in thin_fatbins.containers(data):
        for entry in entries:
            if entry.kind == thin_fatbins.MACHINE_CODE and entry.arch == arch:
                yield thin_fatbins.contents(data, entry)


def files(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.suffix in (".o", ".so")) if path.is_dir() else [path]


def all_kernels(path: Path, arch: int) -> list[Kernel]:
    found = [kernel for file in files(path) for cubin in cubins(file, arch) for kernel in kernels_of(cubin)]
    if not found:
        raise SystemExit(f"{path}: no kernels for {arch}")
    return found


def differences(
    before: Iterable[Kernel], after: Iterable[Kernel]
) -> tuple[int, list[tuple[Kernel | None, Kernel | None]]]:
    """How many are equal, and the pairs of others; None: one has no counterpart."""
    left: dict[str, list[Kernel]] = {}
    for kernel in before:
        left.setdefault(kernel.name, []).append(kernel)
    equal, unequal = 0, []
    for kernel in after:
        same_name = left.get(kernel.name, [])
        twin = next((k for k in same_name if k.parts == kernel.parts), None)
        if twin is None:
            unequal.append(kernel)
        else:
            same_name.remove(twin)
            equal += 1
    pairs: list[tuple[Kernel | None, Kernel | None]] = []
    for kernel in unequal:
        others = left.get(kernel.name, [])
        pairs.append((others.pop() if others else None, kernel))
    pairs += [(kernel, None) for others in left.values() for kernel in others]
    return equal, pairs


@cache
def disassembled(cubin: bytes, nvdisasm: str) -> dict[str, str]:
    """By mangled name."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        sass = subprocess.run([nvdisasm, "-c", file.name], capture_output=True, text=True, check=True).stdout
    return {section.split(",")[0]: section for section in re.split(r"(?m)^\s*\.section\s+\.text\.", sass)[1:]}


def instructions(kernel: Kernel, nvdisasm: str) -> list[str]:
    """Branches and calls to labels by numbers of the kernel's own."""
    sass = plain(disassembled(kernel.cubin, nvdisasm)[kernel.mangled])
    labels: dict[str, str] = {}
    own = re.sub(r"\.L_x_\d+|\$__internal_\d+", lambda found: labels.setdefault(found[0], f"L{len(labels)}"), sass)
    return [" ".join(line.split()) for line in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", own)]


def how_far(before: Kernel, after: Kernel, nvdisasm: str | None) -> str:
    unequal = [part for part in {**before.parts, **after.parts} if before.parts.get(part) != after.parts.get(part)]
    said = ", ".join(
        f"{part} {before.parts.get(part)} -> {after.parts.get(part)}"
        for part in unequal
        if part in ("registers", "frame", "shared")
    )
    said = said or ", ".join(unequal)
    if nvdisasm is None:
        return said
    old, new = (instructions(kernel, nvdisasm) for kernel in (before, after))
    for kind, pattern, put in (("places", r"c\[0x4\]\[0x[0-9a-f]+\]", "c[0x4]"), ("registers", r"\bU?[RP]\d+\b", "R")):
        old, new = ([re.sub(pattern, put, line) for line in lines] for lines in (old, new))
        if old == new:
            return f"{kind} ({said})"
    lines = sum(
        1
        for line in difflib.unified_diff(old, new, n=0, lineterm="")
        if line[0] in "+-" and line[:3] not in ("+++", "---")
    )
    return f"{lines} lines of {len(old)} and {len(new)} instructions ({said})"


def renamed(kernels: list[Kernel], pairs: Iterable[str]) -> list[Kernel]:
    for pair in pairs:
        old, new = pair.split("=")
        kernels = [kernel._replace(name=kernel.name.replace(old, new)) for kernel in kernels]
    return kernels


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--nvdisasm")
    parser.add_argument("--rename", action="append", default=[], metavar="OLD=NEW")
    args = parser.parse_args(arguments)
    before = renamed(all_kernels(args.before, args.arch), args.rename)
    equal, pairs = differences(before, all_kernels(args.after, args.arch))
    alike = 0
    for old, new in pairs:
        if old is not None and new is not None:
            far = how_far(old, new, args.nvdisasm)
            alike += far.startswith(ALIKE)
            print(f"differs: {new.name}: {far}")
        else:
            print(f"only {'after' if old is None else 'before'}: {(new or old).name}")  # type: ignore[union-attr]
    print(f"{equal} kernels are equal, {alike} but for registers or places, {len(pairs) - alike} are not")
    return min(len(pairs) - alike, 1)


if __name__ == "__main__":
    sys.exit(main())
