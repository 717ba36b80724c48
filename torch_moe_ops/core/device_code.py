"""What a compiled extension holds for which GPU, read from the file: the machine code and PTX that nvcc puts there.

An nvcc's output has "fat binaries": a header of 16 bytes (magic number, version, its own size, size of what follows),
then a header and a payload for each target. Of the latter's header this reads the kind (1: PTX, 2: machine code), the
sizes, the architecture's number and two flags, for the suffixes `a` and `f`.
"""

from __future__ import annotations

import mmap
import re
import struct
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from torch_moe_ops.core import extension
from torch_moe_ops.core.check import fail

_MAGIC = struct.pack("<I", 0xBA55ED50)
_OUTER = struct.Struct("<IHHQ")
_INNER = struct.Struct("<HHIQ12xI8xQ")  # kind, version, header's size, payload's size, number, flags
_SUFFIXES = ((0x100000, "a"), (0x200000, "f"))
_KINDS = {1: "compute_", 2: "sm_"}

Capability = tuple[int, int]
OLDEST = (8, 0)  # scripts/cuda_targets.py
HOPPER = (9, 0)


class Target(NamedTuple):
    """One of "sm_80", "sm_90a" (machine code), "compute_80" (PTX)."""

    is_code: bool
    number: int
    suffix: str

    def __str__(self) -> str:
        return f"{'sm_' if self.is_code else 'compute_'}{self.number}{self.suffix}"

    def runs_on(self, capability: Capability) -> bool:
        """Whether a device of this capability takes it: PTX is compiled there for any later one."""
        own = divmod(self.number, 10)
        if self.suffix == "a":
            return capability == own
        same = self.is_code or self.suffix == "f"
        return capability >= own and (capability[0] == own[0] or not same)


def fat_binaries(path: Path) -> list[frozenset[Target]]:
    """The targets of every fat binary in an object or a shared library."""
    if not path.stat().st_size:
        return []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        starts = [found.start() for found in re.finditer(re.escape(_MAGIC), data)]
        found = [_targets(data, start) for start in starts]
    return [targets for targets in found if targets]


def _targets(data: mmap.mmap, start: int) -> frozenset[Target]:
    targets = set()
    if start + _OUTER.size > len(data):
        return frozenset()
    _, version, own, size = _OUTER.unpack_from(data, start)
    if version != 1:
        return frozenset()
    at, end = start + own, min(start + own + size, len(data))
    while at + _INNER.size <= end:
        kind, _, header, payload, number, flags = _INNER.unpack_from(data, at)
        if kind in _KINDS:
            targets.add(Target(kind == 2, number, "".join(s for bit, s in _SUFFIXES if flags & bit)))
        if header < _INNER.size:
            break
        at += header + payload
    return frozenset(targets)


@cache
def held() -> frozenset[Target]:
    """What the installed torch_moe_ops._C_cuda holds; nothing where there is none."""
    file = extension.cuda_extension_file()
    return frozenset().union(*fat_binaries(Path(file))) if file else frozenset()


def missing(capability: Capability, suffixed: str = "") -> str | None:
    """None where the extension has code for such a device, else what it holds and how to get what is missing.

    suffixed: "a" for the kernels in csrc/cuda/sm90, which are made of instructions of that architecture alone.
    None too where nothing could be read from the file: CUDA then says it.
    """
    if not held() or any(t.runs_on(capability) for t in held() if t.suffix == suffixed or not suffixed):
        return None
    names = ", ".join(map(str, sorted(held(), key=lambda t: (not t.is_code, t.number, t.suffix))))
    return f"torch_moe_ops._C_cuda holds {names}; {_mend(capability, suffixed)}"


def _mend(capability: Capability, suffixed: str) -> str:
    if suffixed and capability != HOPPER:
        return "the kernels for Hopper have code for no other: prepare the weights on this device"
    if capability < OLDEST:
        return "its kernels compile for {}.{} and later".format(*OLDEST)
    return f"to compile for it: {extension.BUILD_CUDA}"


@cache
def missing_on(device: torch.device, suffixed: str) -> str | None:
    """`missing` of a CUDA device in this machine."""
    return missing(torch.cuda.get_device_capability(device), suffixed)


def check_device(op: str, argument: str, device: torch.device, suffixed: str = "") -> None:
    """Raise the library's error where the extension has no code for a CUDA device: CUDA's would not say what to do."""
    lacks = missing_on(device, suffixed)
    if lacks is not None:
        capability = torch.cuda.get_device_capability(device)
        need = f"be on a device that kernels were compiled for ({lacks})"
        fail(op, argument, need, f"{torch.cuda.get_device_name(device)} of compute capability {capability}")
