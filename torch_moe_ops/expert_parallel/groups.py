"""The ranks of a layer: a process group, or a mesh with a dimension for experts and one for parts of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torch_moe_ops.config.parallel import NAIVE_BACKENDS, FusedMoEParallelConfig


class Ranks(NamedTuple):
    """The group over which experts are spread, and the one over which each of them is divided (None: it is not)."""

    group: Any
    tp_group: Any = None

    @property
    def name(self) -> str:
        return self.group.group_name

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def tp_name(self) -> str:
        return "" if self.tp_group is None else self.tp_group.group_name

    @property
    def tp_size(self) -> int:
        return 1 if self.tp_group is None else dist.get_world_size(self.tp_group)

    @property
    def tp_rank(self) -> int:
        return 0 if self.tp_group is None else dist.get_rank(self.tp_group)


def ranks_of(group: Any) -> Ranks:
    """The groups of a ProcessGroup or a DeviceMesh; ValueError, TypeError for anything else."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError("ExpertParallel: torch.distributed must be initialised, got no process group")
    if isinstance(group, DeviceMesh):
        return _of_mesh(group)
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "ExpertParallel: group must be a ProcessGroup that this process belongs to, or a DeviceMesh, "
            f"got {type(group).__name__}"
        )
    return Ranks(group)


def _of_mesh(mesh: DeviceMesh) -> Ranks:
    if mesh.ndim == 1:
        return Ranks(mesh.get_group())
    names = mesh.mesh_dim_names or ()
    if set(names) != {"ep", "tp"}:
        raise ValueError(
            f"ExpertParallel: a mesh must have one dimension, or the dimensions 'ep' and 'tp', got {names}"
        )
    tp_group = mesh.get_group("tp")
    return Ranks(mesh.get_group("ep"), tp_group if dist.get_world_size(tp_group) > 1 else None)


def transport_of_config(parallel: FusedMoEParallelConfig) -> str:
    """The transport that `all2all_backend` means: the others than these are names of other libraries' kernels."""
    return "nccl" if parallel.all2all_backend in NAIVE_BACKENDS else "auto"


def check_config(parallel: FusedMoEParallelConfig, ranks: Ranks) -> None:
    """ValueError where the ranks are not those that `parallel` means."""
    if not parallel.use_ep:
        raise ValueError("ExpertParallel: parallel.use_ep must be True, got False (ep_size 1)")
    if (parallel.ep_size, parallel.ep_rank) != (ranks.size, ranks.rank):
        said = f"ep_size {parallel.ep_size}, ep_rank {parallel.ep_rank}"
        raise ValueError(f"ExpertParallel: group must be the one of {said}, got size {ranks.size}, rank {ranks.rank}")
