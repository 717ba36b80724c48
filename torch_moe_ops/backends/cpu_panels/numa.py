"""Weights spread over the memory of all NUMA nodes, where MOEQ_CPU_INTERLEAVE=1 asks for it."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import warnings
from pathlib import Path

from torch import Tensor

VARIABLE = "MOEQ_CPU_INTERLEAVE"
STATUS = Path("/proc/self/status")
_MBIND = {"x86_64": 237, "aarch64": 235}  # numbers of the system call
_MPOL_INTERLEAVE, _MPOL_MF_MOVE = 3, 2
_LONG = 8 * ctypes.sizeof(ctypes.c_ulong)


def allowed_nodes() -> list[int]:
    """The nodes whose memory this process may have; [0] where the system does not tell."""
    lines = STATUS.read_text().splitlines() if STATUS.exists() else []
    for line in lines:
        if line.startswith("Mems_allowed_list:"):
            ranges = (part.partition("-") for part in line.split()[1].split(","))
            return [node for first, _, last in ranges for node in range(int(first), int(last or first) + 1)]
    return [0]


def interleaved(tensor: Tensor) -> Tensor:
    """`tensor`, a CPU tensor, its whole pages dealt to the nodes in turn if MOEQ_CPU_INTERLEAVE is 1.

    Else memory lies on the node of the thread that first writes to it, and the threads of all nodes read the weights
    through that one's memory. Linux only; a system that refuses is warned about, and changes nothing.
    """
    if os.environ.get(VARIABLE) != "1" or type(tensor) is not Tensor or tensor.device.type != "cpu":
        return tensor
    page = os.sysconf("SC_PAGE_SIZE") if sys.platform == "linux" else 1
    begin, end = -(-tensor.data_ptr() // page) * page, (tensor.data_ptr() + tensor.nbytes) // page * page
    if begin < end:
        _interleave(begin, end - begin)
    return tensor


def _interleave(address: int, size: int) -> None:
    number = _MBIND.get(platform.machine()) if sys.platform == "linux" else None
    if number is None:
        warnings.warn(
            f"{VARIABLE}=1 needs Linux on x86-64 or ARM64: weights lie where they would without", stacklevel=4
        )
        return
    nodes = allowed_nodes()
    mask = (ctypes.c_ulong * (max(nodes) // _LONG + 1))()
    for node in nodes:
        mask[node // _LONG] |= 1 << node % _LONG
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (number, address, size, _MPOL_INTERLEAVE, mask, len(mask) * _LONG + 1, _MPOL_MF_MOVE)
    longs = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    if libc.syscall(*longs) != 0:
        reason = os.strerror(ctypes.get_errno())
        warnings.warn(f"{VARIABLE}=1: the system does not interleave memory ({reason})", stacklevel=4)
