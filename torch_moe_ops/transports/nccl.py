"""Transport "nccl": collectives of torch.distributed, over NCCL between GPUs and over gloo between CPUs.

Dispatch: an all-gather of everybody's rows, or, with a capacity, an all-to-all of the rows that a rank needs.
Combine: an all-to-all of partial rows and their sum in float32 in ascending rank order. It sends as many bytes as a
reduce-scatter, whose order of summation is the library's affair and whose partial sums are rounded to what is sent; and
it can send codes and scales, which cannot be added.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_moe_ops.core.check import fail
from torch_moe_ops.transports import launch
from torch_moe_ops.transports.exchange import Combine, Exchange, Rows
from torch_moe_ops.transports.groups import all_gather, all_to_all, largest
from torch_moe_ops.transports.partial_rows import decode, encode

NOBODY = -1  # the expert of a row that stands for no token


def dispatch(rows: Rows, exchange: Exchange) -> tuple[Rows, Tensor]:
    """Rows of every rank [exchange.rows, ...] in ascending rank order, and the positions that `combine` wants."""
    if exchange.capacity:
        return _to_ranks(rows, exchange)
    padded = [_padded(t, exchange.max_tokens, t is rows.topk_ids) for t in rows.present()]
    received = rows.like(all_gather(exchange.group, padded))
    return received, rows.topk_ids.new_empty((0, exchange.world_size), dtype=torch.int32)


def _padded(t: Tensor, size: int, is_ids: bool) -> Tensor:
    missing = size - t.shape[0]
    if not missing:
        return t.contiguous()
    fill = NOBODY if is_ids else 0
    # float8 cannot be filled everywhere.
    codes = t.view(torch.uint8) if t.element_size() == 1 else t
    return torch.cat((codes, codes.new_full((missing, *t.shape[1:]), fill))).view(t.dtype)


def _to_ranks(rows: Rows, exchange: Exchange) -> tuple[Rows, Tensor]:
    """Each row once to every rank that has one of its experts, in the order of the rows."""
    needed = _needed(rows.topk_ids, exchange)
    _check_capacity(needed, exchange)
    positions = torch.where(needed, needed.cumsum(0) - 1, -1)
    token, rank = needed.nonzero(as_tuple=True)
    place = rank * exchange.capacity + positions[token, rank]
    sent = [_scattered(t, token, place, exchange.rows, t is rows.topk_ids) for t in rows.present()]
    return rows.like(all_to_all(exchange.group, sent)), positions.to(torch.int32)


def _needed(topk_ids: Tensor, exchange: Exchange) -> Tensor:
    """bool [T, world_size]: whether a rank has an expert of the token."""
    ends = torch.tensor(exchange.slots, device=topk_ids.device).cumsum(0)
    ranks = torch.searchsorted(ends, topk_ids.long().contiguous(), right=True)  # else it warns
    ranks = torch.where(topk_ids < 0, exchange.world_size, ranks)
    needed = torch.zeros((topk_ids.shape[0], exchange.world_size + 1), dtype=torch.bool, device=topk_ids.device)
    return needed.scatter_(1, ranks, True)[:, :-1]


def _check_capacity(needed: Tensor, exchange: Exchange) -> None:
    """The same error on every rank, before anything else is exchanged: the group stays in step."""
    most = needed.sum(0).max().reshape(1)
    wanted = int(largest(exchange.group, most))
    if wanted > exchange.capacity:
        fail(
            "ep_dispatch", "capacity", f"be at least the {wanted} rows that a rank has for one rank", exchange.capacity
        )


def _scattered(t: Tensor, token: Tensor, place: Tensor, size: int, is_ids: bool) -> Tensor:
    codes = t.view(torch.uint8) if t.element_size() == 1 else t
    sent = codes.new_full((size, *t.shape[1:]), NOBODY if is_ids else 0)
    sent[place] = codes[token]
    return sent.view(t.dtype)


def combine(partial_rows: Tensor, exchange: Exchange, how: Combine) -> Tensor:
    """Sums [num_tokens, hidden_size] of the ranks' partial rows [exchange.rows, hidden_size], in float32, ascending."""
    received = _to_owners(partial_rows, exchange.group, how.wire_dtype)
    parts = received.unflatten(0, (exchange.world_size, exchange.rows_of_a_rank))
    if how.positions.shape[0]:
        parts = _placed(parts, how.positions)
    if not how.tp_group:
        return ordered_sum(parts[:, : how.num_tokens], how.out_dtype)
    # Ranks that hold other parts of the experts have the same tokens; the padding makes their sizes alike for certain.
    whole = ordered_sum(parts, torch.float32)
    if how.positions.shape[0]:
        whole = _padded(whole, exchange.max_tokens, False)
    return over_tensor_parallel(whole, how)


def _to_owners(partial_rows: Tensor, group: str, wire_dtype: torch.dtype | None) -> Tensor:
    """Of every rank the part that is of this rank's tokens, in ascending rank order: shaped like partial_rows."""
    if wire_dtype is None:
        return all_to_all(group, [partial_rows])[0]
    return decode(*all_to_all(group, list(encode(partial_rows))))


def over_tensor_parallel(whole: Tensor, how: Combine) -> Tensor:
    """The sum of [max_tokens, hidden_size] float32 of the ranks of how.tp_group, in ascending order, rounded once."""
    (gathered,) = all_gather(how.tp_group, [whole])
    return ordered_sum(gathered.unflatten(0, (how.tp_size, -1))[:, : how.num_tokens], how.out_dtype)


def _placed(parts: Tensor, positions: Tensor) -> Tensor:
    """[world_size, T, hidden_size]: a token's partial rows, zeros where a rank had none of its experts."""
    index = positions.t().long()
    found = torch.take_along_dim(parts, index.clamp_min(0)[..., None], 1)
    return torch.where((index >= 0)[..., None], found, 0)


def ordered_sum(parts: Tensor, out_dtype: torch.dtype) -> Tensor:
    """parts [n, ...] added in float32 from the first to the last, rounded once: new memory."""
    if launch.has_kernels(parts.device) and parts.shape[0] <= launch.MOST_PARTS and parts[0].is_contiguous():
        return launch.ordered_sum(parts, out_dtype)
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(out_dtype)
