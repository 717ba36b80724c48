"""ep_implementation="moeq": transformers' expert parallelism over the library's transports (transformers >= 5.21)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from transformers.distributed.expert_parallel import AllToAllEP, EPImplementation, EPImplementationInterface

from torch_moe_ops.transformers.experts import IMPLEMENTATION
from torch_moe_ops.transports.groups import all_gather, largest
from torch_moe_ops.transports.members import Wanted, member
from torch_moe_ops.transports.registry import choose


def register_expert_parallel() -> None:
    EPImplementationInterface.register(IMPLEMENTATION, MoeqEP)


class MoeqEP(EPImplementation):  # type: ignore[misc]
    """Experts as transformers shards them, any experts implementation; rows move as in `ExpertParallel`.

    Where the ranks of the expert group share one batch (ep_size == tp_size), each runs its experts on all of it; the
    partial results are added in float32 in ascending rank order, a part of the rows on each rank, and gathered. Else
    rows are dispatched and combined, each once: ranks of a TP group, which share a batch, take a part of it each.

    Where gradients are wanted, transformers' own all-to-all runs instead. Where batches differ, a call waits once for
    the host, to learn the largest number of rows on any rank; under torch.compile and in CUDA graphs it does not, and
    all ranks must have the same number.
    """

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self._differentiable = AllToAllEP(experts, ep_mesh, tp_mesh)
        self._group, self._tp_group = ep_mesh.get_group(), tp_mesh.get_group()
        self._size, self._rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        self._tp_size, self._tp_rank = dist.get_world_size(self._tp_group), dist.get_rank(self._tp_group)
        self._experts = int(experts.num_experts)  # of this rank
        self._chosen: str | None = None

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        batch = (hidden_states, top_k_index, top_k_weights)
        if torch.is_grad_enabled() and any(t.requires_grad for t in (hidden_states, top_k_weights)):
            return self._differentiable(*batch)
        if self.shares_batch:
            return self._of_shared_batch(*batch)
        if self._tp_size == 1:
            return self._exchanged(*batch)
        tokens = hidden_states.shape[0]
        of_rank = -(-tokens // self._tp_size)
        part = slice(self._tp_rank * of_rank, (self._tp_rank + 1) * of_rank)
        mine = self._exchanged(*(t[part] for t in batch))
        return _gathered(self._tp_group, pad(mine, (0, 0, 0, of_rank - mine.shape[0])))[:tokens]

    def _of_shared_batch(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        tokens = x.shape[0]
        of_rank = max(1, -(-tokens // self._size))
        missing = (0, 0, 0, of_rank * self._size - tokens)
        rows = self._of_local_experts(pad(x, missing), pad(ids, missing, value=-1), pad(weights, missing))
        none = ids.new_empty((0, self._size), dtype=torch.int32)
        mine = torch.ops.moeq.ep_combine(rows, none, of_rank, *self._exchange(x, of_rank), x.dtype)
        return _gathered(self._group, mine)[:tokens]

    def _exchanged(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        head = self._exchange(x, self._most(x))
        given = (x, None, ids.to(torch.int32), weights.to(torch.float32))
        all_x, _, all_ids, all_weights, positions = torch.ops.moeq.ep_dispatch(*given, *head)
        rows = self._of_local_experts(all_x, all_ids.to(ids.dtype), all_weights.to(weights.dtype))
        return torch.ops.moeq.ep_combine(rows, positions, x.shape[0], *head, x.dtype)

    def _of_local_experts(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Partial results: of other ranks' experts, transformers' experts skip the id num_local_experts."""
        local = ids - self._rank * self._experts
        others = (local < 0) | (local >= self._experts)
        return self.experts_forward(x, local.masked_fill(others, self._experts), weights.masked_fill(others, 0))

    def _most(self, x: Tensor) -> int:
        """Rows of the rank that has most of them; 1 at least."""
        rows = x.shape[0]
        capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
        if not (capturing or torch.compiler.is_compiling()):
            rows = int(largest(self._group.group_name, torch.tensor([rows], device=x.device)))
        return max(1, rows)

    def _exchange(self, x: Tensor, max_tokens: int) -> tuple[str, str, int, int]:
        """The arguments of both ops that say between whom; the first call of all ranks chooses the transport."""
        if self._chosen is None:
            found: list[Any] = [None] * self._size
            dist.all_gather_object(found, member(x.device), group=self._group)
            transport, _ = choose("auto", Wanted(tuple(found), x.shape[-1], 0))
            transport.prepare(self._group, x.device)
            self._chosen = transport.name
        return self._chosen, self._group.group_name, self._size, max_tokens


def _gathered(group: Any, rows: Tensor) -> Tensor:
    (found,) = all_gather(group.group_name, [rows])
    return found
