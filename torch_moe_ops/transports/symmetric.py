"""Buffers that the GPUs of one host map into each other, one a group; made outside of CUDA graphs, by all ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torch_moe_ops.core.check import fail
from torch_moe_ops.transports.groups import group_of

_LINE = 128  # bytes


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


class Heap(NamedTuple):
    """Memory of a group that all of its ranks map, for experts that exchange rows by themselves (p2p.py).

    A rank's tokens, then for all slots of all ranks places and weights, then partial rows, each with the room that the
    largest layer of the group needs. addresses: int64 [ranks] on the CPU; sizes: bytes of the first three, likewise.
    """

    addresses: Tensor
    sizes: Tensor
    own: Tensor
    room: tuple[int, ...]  # bytes of all four
    kept: tuple[Any, ...]

    def part(self, number: int, dtype: torch.dtype, shape: tuple[int, int]) -> Tensor:
        """The beginning of this rank's part of a number, 0 to 3, as a matrix."""
        start, bytes_ = sum(self.room[:number]), shape[0] * shape[1] * dtype.itemsize
        return self.own[start : start + bytes_].view(dtype).view(shape)


_OF_GROUPS: dict[str, Buffers] = {}
_HEAPS: dict[str, Heap] = {}
_OUTGROWN: list[Heap] = []  # which captured graphs may still use


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


def prepare_heap(group: Any, device: torch.device, room: tuple[int, ...]) -> None:
    """Have a heap with at least so many bytes for each of its parts, the same on all ranks. Collective."""
    name = group.group_name
    made = _HEAPS.get(name)
    if made is not None and _OF_GROUPS[name].group is made.kept[0]:
        if all(has >= wants for has, wants in zip(made.room, room, strict=True)):
            return
        _OUTGROWN.append(made)
        room = tuple(map(max, made.room, room))
    import torch.distributed._symmetric_memory as symmetric

    room = tuple(-(-size // _LINE) * _LINE for size in room)
    with torch.cuda.device(device), torch.inference_mode(False):
        own = symmetric.empty(sum(room), dtype=torch.uint8, device=torch.device("cuda", torch.cuda.current_device()))
        handle = symmetric.rendezvous(own, group)
        parts = [handle.get_buffer(r, (sum(room),), torch.uint8) for r in range(dist.get_world_size(group))]
        addresses = torch.tensor([part.data_ptr() for part in parts], dtype=torch.int64, device="cpu")
        sizes = torch.tensor(room[:3], dtype=torch.int64, device="cpu")
        torch.cuda.synchronize()
        dist.barrier(group, device_ids=[torch.cuda.current_device()])
        torch.cuda.synchronize()
    _HEAPS[name] = Heap(addresses, sizes, parts[dist.get_rank(group)], room, (group, own, handle, *parts))


def heap_of(name: str) -> Heap | None:
    """That of a group, None where no layer of it has asked for one."""
    found = _HEAPS.get(name)
    return found if found is not None and found.kept[0] is group_of(name) else None


def _limit(group: Any) -> float:
    """The group's own bound for a collective, in seconds: `init_process_group(timeout=)`."""
    return float(group._get_backend(torch.device("cuda")).options._timeout.total_seconds())


def buffers_of(op: str, name: str) -> Buffers:
    """Those that a layer of this group has made; RuntimeError where none has."""
    found = _OF_GROUPS.get(name)
    if found is None or found.group is not group_of(name):
        fail(op, "group", "have a layer ExpertParallel(..., transport='p2p'), which makes its buffers", name)
    return found
