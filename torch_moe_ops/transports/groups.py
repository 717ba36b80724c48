"""Process groups by name, as ops of a graph name them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d


def group_of(name: str) -> Any:
    """The process group of that name; RuntimeError where this process has none."""
    resolve: Any = c10d._resolve_process_group  # functional collectives name them alike
    return resolve(name)


def all_gather(group: str, tensors: list[Tensor]) -> list[Tensor]:
    """Each tensor [n, ...] of every rank, in ascending rank order: [world_size * n, ...], in one launch with NCCL."""
    pg = group_of(group)
    gathered = [t.new_empty((pg.size() * t.shape[0], *t.shape[1:])) for t in tensors]
    pairs = [(_bytes(out), _bytes(t)) for out, t in zip(gathered, tensors, strict=True) if t.numel()]
    if pairs:
        options = c10d.AllgatherOptions()
        options.asyncOp = False  # on the current stream
        # The name that torch itself calls in newer releases, which keep the older one beside it; and in older ones.
        run = getattr(pg, "all_gather_single_coalesced", None) or pg.allgather_into_tensor_coalesced
        _wait(run([out for out, _ in pairs], [t for _, t in pairs], options))
    return gathered


def all_to_all(group: str, tensors: list[Tensor]) -> list[Tensor]:
    """Part r of each tensor [world_size * n, ...] goes to rank r; parts of all ranks come, in ascending rank order."""
    pg = group_of(group)
    options = c10d.AllToAllOptions()
    options.asyncOp = False
    run = getattr(pg, "all_to_all_single", None) or pg.alltoall_base  # likewise
    received = [torch.empty_like(t) for t in tensors]
    for out, t in zip(received, tensors, strict=True):
        if t.numel():
            _wait(run(_bytes(out), _bytes(t), [], [], options))
    return received


def largest(group: str, values: Tensor) -> Tensor:
    """The maximum over ranks, element by element, in place."""
    dist.all_reduce(values, dist.ReduceOp.MAX, group=group_of(group))
    return values


def _bytes(t: Tensor) -> Tensor:
    """Collectives of gloo know neither float8 nor packed codes; bytes are all the same."""
    return t.reshape(-1).view(torch.uint8)


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()
