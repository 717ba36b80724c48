"""Buffers that the GPUs of one host map into each other, one a group; made outside of CUDA graphs, by all ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torch_moe_ops.core.check import fail
from torch_moe_ops.transports.groups import group_of


class Buffers(NamedTuple):
    """Of one group, as this rank sees them.

    addresses: int64 [ranks] on the CPU. limit: seconds that a kernel waits for another rank. kept: what must live
    as long as anything can launch with them.
    """

    addresses: Tensor
    rank: int
    limit: float
    group: Any
    kept: tuple[Any, ...]


_OF_GROUPS: dict[str, Buffers] = {}


def prepare_buffers(group: Any, device: torch.device) -> None:
    """Allocate and map the buffers of a group, unless it has them. Collective; waits for all ranks."""
    name = group.group_name
    made = _OF_GROUPS.get(name)
    if made is not None and made.group is group:
        return
    import torch.distributed._symmetric_memory as symmetric

    with torch.cuda.device(device), torch.inference_mode(False):
        size = torch.ops.moeq_C.ep_p2p_buffer_bytes()
        own = symmetric.empty(size, dtype=torch.uint8, device=torch.device("cuda", torch.cuda.current_device()))
        handle = symmetric.rendezvous(own, group)
        own.zero_()
        parts = [handle.get_buffer(r, (size,), torch.uint8) for r in range(dist.get_world_size(group))]
        addresses = torch.tensor([part.data_ptr() for part in parts], dtype=torch.int64, device="cpu")
        # No rank may write into a buffer before it is zero.
        torch.cuda.synchronize()
        dist.barrier(group, device_ids=[torch.cuda.current_device()])
        torch.cuda.synchronize()
    kept = (own, handle, *parts)
    _OF_GROUPS[name] = Buffers(addresses, dist.get_rank(group), _limit(group), group, kept)


def _limit(group: Any) -> float:
    """The group's own bound for a collective, in seconds: `init_process_group(timeout=)`."""
    return float(group._get_backend(torch.device("cuda")).options._timeout.total_seconds())


def buffers_of(op: str, name: str) -> Buffers:
    """Those that a layer of this group has made; RuntimeError where none has."""
    found = _OF_GROUPS.get(name)
    if found is None or found.group is not group_of(name):
        fail(op, "group", "have a layer ExpertParallel(..., transport='p2p'), which makes its buffers", name)
    return found
