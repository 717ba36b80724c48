"""What a layer asks of a transport, and what each rank of its group says of itself: the same on every rank."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import NamedTuple

import torch

from torch_moe_ops.core.extension import cuda_extension_reason, has_cuda_extension
from torch_moe_ops.core.torch_names import SYMMETRIC_MEMORY, missing

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Member(NamedTuple):
    """One rank. gpu: an identifier, "" on a CPU. reaches: GPUs whose memory it can map, its own included.

    lacks: why this process could not run kernels that read and write other GPUs' memory, "" where it could.
    """

    host: str
    gpu: str
    reaches: tuple[str, ...]
    lacks: str


class Wanted(NamedTuple):
    """Of one layer: its ranks in ascending order, and what the exchange has to do. wire_dtype: as of Combine."""

    members: tuple[Member, ...]
    hidden_size: int
    capacity: int
    wire_dtype: torch.dtype | None = None


def member(device: torch.device) -> Member:
    """What this process says, of the device that its experts are on."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    host = f"{socket.gethostname()} {boot}"
    if device.type != "cuda":
        return Member(host, "", (), f"the experts are on {device.type}")
    index = torch.cuda.current_device() if device.index is None else device.index
    names = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    reached = [i for i in range(len(names)) if i == index or torch.cuda.can_device_access_peer(index, i)]
    return Member(host, names[index], tuple(names[i] for i in reached), _lacks())


def _lacks() -> str:
    if torch.version.cuda is None:
        return "torch was not built for CUDA"
    if not has_cuda_extension():
        return cuda_extension_reason()
    if not hasattr(torch.ops.moeq_C, "ep_p2p_dispatch"):
        return "the CUDA extension was compiled from older sources, without the kernels"
    if names := missing(SYMMETRIC_MEMORY):
        return f"torch {torch.__version__} does not have {', '.join(names)}"
    return ""
