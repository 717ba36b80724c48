"""Transport "p2p": kernels that read and write the memory of the other GPUs of one host (csrc/cuda/expert_parallel).

Dispatch: every rank stages its rows once, and reads those of the others. Combine: every rank writes its partial rows to
the rank whose tokens they are of, which adds them in float32 in ascending rank order. One launch each. Few rows are
written to the other ranks both ways, as words that carry their round.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.core.check import fail
from torch_moe_ops.transports.exchange import Combine, Exchange, Rows
from torch_moe_ops.transports.members import Wanted
from torch_moe_ops.transports.nccl import over_tensor_parallel
from torch_moe_ops.transports.symmetric import Buffers, Heap, buffers_of, heap_of

MOST_RANKS = 8  # kMostRanks of buffer.cuh
_VECTOR = 16  # bytes
# Bytes of a rank's rows up to which they go as words, in a dispatch and in a combine: alike on all ranks.
# Between four H200s words of 115 KB took 13.2 us both ways, with flags 15.8, and words of 229 KB 18.6 and 17.6.
FEW = 131072


# Bytes of a rank's rows from which experts that can do so exchange rows by themselves.
REMOTE_FROM = 1 << 18
MOST_TOP_K = 32  # of a heap's places


def reason_against(wanted: Wanted) -> str | None:
    """Why these ranks cannot exchange so; the same on each of them."""
    members = wanted.members
    if not 2 <= len(members) <= MOST_RANKS:
        return f"it is for 2 to {MOST_RANKS} ranks, the group has {len(members)}"
    for rank, one in enumerate(members):
        if one.lacks:
            return f"rank {rank}: {one.lacks}"
    if len({one.host for one in members}) > 1:
        return "the ranks are on several hosts"
    if len({one.gpu for one in members}) < len(members):
        return "several ranks share a GPU"
    for rank, one in enumerate(members):
        far = [peer for peer, other in enumerate(members) if other.gpu not in one.reaches]
        if far:
            return f"rank {rank} sees no GPU of rank {far[0]} with peer access"
    if wanted.capacity:
        return "it sends every row to every rank, a capacity is of transport 'nccl'"
    if wanted.wire_dtype is not None:
        return f"it sends partial rows as they are, {wanted.wire_dtype} is of transport 'nccl'"
    if wanted.hidden_size % 8:
        return f"it is for a hidden size that is a multiple of 8, not {wanted.hidden_size}"
    return None


def dispatch(rows: Rows, exchange: Exchange) -> tuple[Rows, Tensor]:
    """As of nccl.py."""
    own = _buffers("ep_dispatch", exchange)
    given = [_aligned(t) for t in rows]
    received = [None if t is None else t.new_empty((exchange.rows, t.shape[1])) for t in rows]
    order = (own.addresses, own.rank, exchange.max_tokens, own.limit, FEW)
    torch.ops.moeq_C.ep_p2p_dispatch(*given, *received, *order)
    return Rows(*received), rows.topk_ids.new_empty((0, exchange.world_size), dtype=torch.int32)  # type: ignore[arg-type]


def _buffers(op: str, exchange: Exchange) -> Buffers:
    if exchange.capacity:
        fail(op, "capacity", "be 0 with transport 'p2p', which sends every row to every rank", exchange.capacity)
    return buffers_of(op, exchange.group)


def _aligned(t: Tensor | None) -> Tensor | None:
    if t is None:
        return None
    whole = t.contiguous()
    return whole if whole.data_ptr() % _VECTOR == 0 else whole.clone()


def room(hidden_size: int, max_tokens: int, ranks: int, partial_dtype: torch.dtype) -> tuple[int, ...]:
    """Bytes of each part of a heap (symmetric.py) for calls of a layer."""
    slots = ranks * max_tokens * MOST_TOP_K
    return max_tokens * hidden_size * 2, slots * 4, slots * 4, ranks * max_tokens * hidden_size * partial_dtype.itemsize


class Around(NamedTuple):
    """What goes before and after experts that exchange rows by themselves, in one call of a layer."""

    own: Buffers
    heap: Heap
    exchange: Exchange
    partial_dtype: torch.dtype

    def _names(self) -> tuple[Tensor, Tensor, Tensor, int]:
        return self.own.addresses, self.heap.addresses, self.heap.sizes, self.own.rank

    def stage(self, call: ExpertsCall, tables: Sequence[Tensor]) -> tuple[Remote, Tensor]:
        """Tokens, places and weights to where the experts of all ranks find them; and the places of this rank's tokens.

        call: checked, complete and aligned, on this rank's tokens; tables: first, count, slots and load of placing.py,
        none where its ids are places.
        """
        most, hidden, top_k = self.exchange.max_tokens, call.hidden_states.shape[1], call.topk_ids.shape[1]
        places = torch.empty_like(call.topk_ids)
        given = (call.hidden_states, call.topk_ids, call.topk_weights, places)
        torch.ops.moeq_C.ep_p2p_stage(*given, *self._names(), most, self.own.limit, *tables)
        rows = (self.exchange.rows, top_k)
        on_rows = call._replace(
            hidden_states=self.heap.part(0, call.hidden_states.dtype, (most, hidden)),
            topk_ids=self.heap.part(1, torch.int32, rows),
            topk_weights=self.heap.part(2, torch.float32, rows),
        )
        where = {"heaps": self.heap.addresses, "sizes": self.heap.sizes, "rank": self.own.rank}
        parts = self.heap.part(3, self.partial_dtype, (self.exchange.rows, hidden))
        return Remote(on_rows, where, parts), places

    def add(self, parts: Tensor, places: Tensor, out: Tensor) -> Tensor:
        """`out`, filled with the sums of the partial rows that all ranks have written."""
        torch.ops.moeq_C.ep_p2p_sum(parts, places, out, _ends(self.exchange.slots), *self._names(), self.own.limit)
        return out


class Remote(NamedTuple):
    """The arguments of RemoteExperts.run."""

    call: ExpertsCall
    where: dict[str, Any]
    parts: Tensor


@cache
def _ends(slots: tuple[int, ...]) -> Tensor:
    return torch.tensor(list(accumulate(slots)), dtype=torch.int64, device="cpu")


def around(call: ExpertsCall, exchange: Exchange, partial_dtype: torch.dtype) -> Around | None:
    """None where such rows are exchanged in steps of their own. By what is the same on every rank alone."""
    heap = heap_of(exchange.group)
    hidden, top_k = call.hidden_states.shape[1], call.topk_ids.shape[1]
    if heap is None or call.hidden_states.dtype is not torch.bfloat16 or top_k > MOST_TOP_K:
        return None
    if exchange.max_tokens * hidden * 2 < REMOTE_FROM:
        return None
    wanted = room(hidden, exchange.max_tokens, exchange.world_size, partial_dtype)
    if any(has < wants for has, wants in zip(heap.room, wanted, strict=True)):
        return None
    return Around(buffers_of("ep_experts", exchange.group), heap, exchange, partial_dtype)


def combine(partial_rows: Tensor, exchange: Exchange, how: Combine) -> Tensor:
    """As of nccl.py."""
    if how.wire_dtype is not None:
        fail("ep_combine", "wire_dtype", "be None with transport 'p2p', which sends rows as they are", how.wire_dtype)
    own = _buffers("ep_combine", exchange)
    tokens, dtype = (exchange.max_tokens, torch.float32) if how.tp_group else (how.num_tokens, how.out_dtype)
    out = partial_rows.new_empty((tokens, partial_rows.shape[1]), dtype=dtype)
    torch.ops.moeq_C.ep_p2p_combine(_aligned(partial_rows), out, own.addresses, own.rank, own.limit, FEW)
    return over_tensor_parallel(out, how) if how.tp_group else out
