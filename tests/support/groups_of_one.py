"""Process groups of this process alone, beside torch's default group, which other tests may set up or miss."""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_ALIVE = []  # names alone do not keep a group


@cache
def group_of_one(device: str) -> str:
    """The name of a group of one rank, over gloo for a CPU and over NCCL for a GPU."""
    store = dist.HashStore()
    group = dist.ProcessGroup(store, 0, 1)
    kind = "nccl" if device == "cuda" else "gloo"
    backend = dist.ProcessGroupNCCL(store, 0, 1) if kind == "nccl" else dist.ProcessGroupGloo(store, 0, 1)
    group._register_backend(torch.device(device), getattr(dist.ProcessGroup.BackendType, kind.upper()), backend)
    name = f"of_one_on_{device}"
    group._set_group_name(name)
    c10d._register_process_group(name, group)
    _ALIVE.append(group)
    return name
