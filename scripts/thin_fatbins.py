"""Leave in a shared library only the device code that one kind of GPU runs; the rest becomes zeros, which compress.

    python scripts/thin_fatbins.py IN.so OUT.so --arch 90
    python scripts/thin_fatbins.py IN.so OUT.so --arch 90 --kernels 'topk|marlin' --compile

Of every fat binary (a container that nvcc embeds, of one source file) the machine code is kept that the driver would
take: that of the same major architecture and the nearest minor one, or of the newest one before it with the same major;
where there is none, PTX that can be compiled for it. Sizes and places stay as they are, so that nothing has to be
relocated. A library that is loaded on another kind of GPU afterwards fails at its first launch.

--kernels keeps only the fat binaries that have a kernel of such a name; any other kernel fails when it is launched.
--compile puts machine code in the place of PTX, which the driver would compile at the first launch, often for minutes;
it needs ptxas and fatbinary of CUDA. Both need the package `zstandard`, as nvcc compresses what it embeds.
"""

from __future__ import annotations

import argparse
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAGIC = struct.pack("<I", 0xBA55ED50)
CONTAINER = struct.Struct("<IHHQ")  # magic, version, size of this header, size of what follows
ENTRY = struct.Struct(
    "<HHIQIIHHI"
)  # kind, version, size of this header, of the payload, .., minor, major, architecture
PTX, MACHINE_CODE = 1, 2
ZSTD = bytes.fromhex("28b52ffd")


class Entry(NamedTuple):
    kind: int
    arch: int
    begin: int  # of the payload in the file
    size: int


def containers(data: bytes | bytearray) -> Iterator[list[Entry]]:
    """The entries of every fat binary of a file."""
    at = data.find(MAGIC)
    while at >= 0:
        entries, after = _entries(data, at)
        if entries:
            yield entries
        at = data.find(MAGIC, after)


def _entries(data: bytes | bytearray, at: int) -> tuple[list[Entry], int]:
    """The entries of the container at a place, and where to look on; none where it only looks like one."""
    nothing: tuple[list[Entry], int] = ([], at + len(MAGIC))
    if at + CONTAINER.size > len(data):
        return nothing
    _, version, header, size = CONTAINER.unpack_from(data, at)
    place, end = at + header, at + header + size
    if version != 1 or header != CONTAINER.size or end > len(data):
        return nothing
    found = []
    while place < end:
        if place + ENTRY.size > end:
            return nothing
        kind, _, own, payload, *_, arch = ENTRY.unpack_from(data, place)
        if own < ENTRY.size or place + own + payload > end:
            return nothing
        found.append(Entry(kind, arch, place + own, payload))
        place += own + payload
    return found, end


def runs_on(entries: list[Entry], arch: int) -> list[Entry]:
    """Those of a container that a GPU of this architecture (90: compute capability 9.0) takes."""
    fitting = [e.arch for e in entries if e.kind == MACHINE_CODE and e.arch <= arch and e.arch // 10 == arch // 10]
    if fitting:
        return [e for e in entries if e.kind == MACHINE_CODE and e.arch == max(fitting)]
    return [e for e in entries if e.kind == PTX and e.arch <= arch]


def contents(data: bytes | bytearray, entry: Entry) -> bytes:
    """The payload as it was before nvcc compressed it."""
    payload = bytes(data[entry.begin : entry.begin + entry.size])
    if not payload.startswith(ZSTD):
        return payload
    import zstandard

    return zstandard.ZstdDecompressor().decompressobj().decompress(payload)


def names(data: bytes | bytearray, entry: Entry) -> list[str]:
    """The kernels of one payload."""
    pattern = rb"\.entry\s+([\w$]+)" if entry.kind == PTX else rb"\.text\.([\w$]+)"
    return sorted({name.decode() for name in re.findall(pattern, contents(data, entry))})


def thin(data: bytes, arch: int, kernels: str | None = None, *, compiles: bool = False) -> tuple[bytes, int]:
    """The file with the other payloads zeroed, and how many bytes those are."""
    result, zeroed = bytearray(data), 0
    for entries in containers(data):
        kept = runs_on(entries, arch)
        if kernels is not None and not any(re.search(kernels, name) for e in kept for name in names(data, e)):
            kept = []
        for entry in entries:
            if entry not in kept:
                result[entry.begin : entry.begin + entry.size] = bytes(entry.size)
                zeroed += entry.size
        if compiles and kept and kept[0].kind == PTX:
            zeroed += _compile(result, entries, kept[0], arch)
    return bytes(result), zeroed


def _compile(data: bytearray, entries: list[Entry], ptx: Entry, arch: int) -> int:
    """Overwrite a container by one of machine code, where that fits. Returns how many bytes more are zeros."""
    made = _machine_code(contents(data, ptx).rstrip(b"\0"), arch)
    begin = data.rfind(MAGIC, 0, entries[0].begin)
    end = max(entry.begin + entry.size for entry in entries)
    if len(made) > end - begin:
        print(f"left as PTX: {len(made)} bytes of machine code do not fit in {end - begin}")
        return 0
    data[begin:end] = made.ljust(end - begin, b"\0")
    return ptx.size - len(made)


def _machine_code(ptx: bytes, arch: int) -> bytes:
    """A container with what ptxas makes of a program."""
    with tempfile.TemporaryDirectory() as folder:
        source, code, made = (Path(folder) / name for name in ("a.ptx", "a.cubin", "a.fatbin"))
        source.write_bytes(ptx)
        subprocess.run(["ptxas", f"-arch=sm_{arch}", str(source), "-o", str(code)], check=True)
        image = f"--image3=kind=elf,sm={arch},file={code}"
        options = ["--64", "--compress-all", "--compress-mode=size", f"--create={made}"]
        subprocess.run(["fatbinary", *options, image], check=True)
        return made.read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--kernels", help="a regular expression, which fits somewhere in their mangled names")
    parser.add_argument("--compile", action="store_true", help="machine code in place of PTX")
    args = parser.parse_args()
    data, zeroed = thin(args.library.read_bytes(), args.arch, args.kernels, compiles=args.compile)
    args.out.write_bytes(data)
    print(f"{args.out.name}: {zeroed / 1e6:.1f} of {len(data) / 1e6:.1f} MB are zeros now")


if __name__ == "__main__":
    main()
