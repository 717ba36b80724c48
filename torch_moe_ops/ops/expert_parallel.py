"""The ops of expert parallelism: `ep_place`, `ep_dispatch` and `ep_combine` (schemas: core/schemas.py).

Shapes of results follow from the arguments alone, so that every rank has the same ones and nothing waits for the host;
with a capacity `ep_dispatch` waits once, to tell an overflow on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.core.check import check, check_given, describe, fail
from torch_moe_ops.core.schemes import FLOATS
from torch_moe_ops.ops.bind import attach, like_a_kernel
from torch_moe_ops.transports.exchange import ALONE, Combine, Exchange, Rows
from torch_moe_ops.transports.groups import group_of
from torch_moe_ops.transports.partial_rows import WIRE_DTYPES
from torch_moe_ops.transports.placing import place
from torch_moe_ops.transports.registry import TRANSPORTS

# Hidden states as they are or as codes, and scales of codes.
_ROWS = (*FLOATS, torch.uint8, torch.int8, torch.float8_e4m3fn)
_SCALES = (torch.float32, torch.uint8, torch.float8_e4m3fn)
Dispatched = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def check_place(
    topk_ids: Tensor, first: Tensor, count: Tensor, slots: Tensor, load: Tensor, rank: int, op: str = "ep_place"
) -> None:
    for name, t in zip(
        ("topk_ids", "first", "count", "slots", "load"), (topk_ids, first, count, slots, load), strict=True
    ):
        check_given(op, name, t)
    _check_ids(op, topk_ids, (torch.int32, torch.int64))
    for name, t, dtype in (
        ("first", first, torch.int32),
        ("count", count, torch.int32),
        ("slots", slots, torch.int32),
        ("load", load, torch.int64),
    ):
        if t.dtype != dtype or t.ndim != 1 or not t.shape[0]:
            fail(op, name, f"be a {dtype} tensor of one dimension, not empty", f"{t.dtype} {tuple(t.shape)}")
        if t.device != topk_ids.device:
            fail(op, name, f"be on {topk_ids.device} like topk_ids", t.device)
    if not first.shape == count.shape == load.shape:
        fail(op, "first, count and load", "have an element for each expert", (first.shape, count.shape, load.shape))
    if not load.is_contiguous():
        fail(op, "load", "be contiguous", f"strides {load.stride()}")
    if rank < 0:
        fail(op, "rank", "be at least 0", rank)


def _place(topk_ids: Tensor, first: Tensor, count: Tensor, slots: Tensor, load: Tensor, rank: int) -> Tensor:
    check_place(topk_ids, first, count, slots, load, rank)
    with like_a_kernel(topk_ids.device.type):
        placed = place(topk_ids, first, count, slots, load, rank)
    torch._C._increment_version((load,))
    return placed


def _place_fake(topk_ids: Tensor, first: Tensor, count: Tensor, slots: Tensor, load: Tensor, rank: int) -> Tensor:
    check_place(topk_ids, first, count, slots, load, rank)
    return topk_ids.new_empty(topk_ids.shape, dtype=torch.int32)


def _check_ids(op: str, topk_ids: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if topk_ids.ndim != 2 or topk_ids.shape[1] < 1:
        fail(op, "topk_ids", "have shape [num_tokens, top_k] with top_k at least 1", topk_ids.shape)
    if topk_ids.dtype not in dtypes:
        fail(op, "topk_ids", f"have one of the dtypes {[str(d) for d in dtypes]}", topk_ids.dtype)


def check_exchange(op: str, transport: str, exchange: Exchange) -> None:
    if transport not in TRANSPORTS:
        fail(op, "transport", f"be one of {list(TRANSPORTS)}", transport)
    for name, least in (("world_size", 1), ("max_tokens", 1), ("capacity", 0)):
        if getattr(exchange, name) < least:
            fail(op, name, f"be at least {least}", getattr(exchange, name))
    if exchange.capacity and len(exchange.slots) != exchange.world_size:
        fail(op, "slots", f"have an element for each of {exchange.world_size} ranks", exchange.slots)


def check_group(op: str, name: str, group: str, size: int) -> None:
    """Of what runs: a group of another size would leave memory unwritten, or ranks waiting."""
    found = group_of(group).size()
    if found != size:
        fail(op, name, f"be {found}, the size of group {group!r}", f"{size}{ALONE}")


def _check_dispatch(rows: Rows, transport: str, exchange: Exchange) -> None:
    op = "ep_dispatch"
    for name in ("hidden_states", "topk_ids", "topk_weights"):
        check_given(op, name, getattr(rows, name))
    check_exchange(op, transport, exchange)
    _check_ids(op, rows.topk_ids, (torch.int32,))
    if rows.topk_weights.ndim != 2 or rows.topk_weights.shape[1] != rows.topk_ids.shape[1]:
        fail(op, "topk_weights", f"have shape {tuple(rows.topk_ids.shape)} like topk_ids", rows.topk_weights.shape)
    tokens = rows.topk_ids.shape[0]
    for name, t, dtypes in (
        ("hidden_states", rows.hidden_states, _ROWS),
        ("hidden_states_scale", rows.scale, _SCALES),
        ("topk_weights", rows.topk_weights, (torch.float32,)),
    ):
        if t is None:
            continue
        if t.ndim != 2 or not t.shape[1]:
            fail(op, name, "have shape [num_tokens, columns] with a column at least", t.shape)
        if t.dtype not in dtypes:
            fail(op, name, f"have one of the dtypes {[str(d) for d in dtypes]}", t.dtype)
        check(
            t.shape[0] == tokens,
            lambda name=name, t=t: describe(op, name, f"have {tokens} rows like topk_ids", t.shape),  # type: ignore[misc]
        )
        if t.device != rows.topk_ids.device:
            fail(op, name, f"be on {rows.topk_ids.device} like topk_ids", t.device)
    text = f"have at most max_tokens = {exchange.max_tokens} rows"
    check(tokens <= exchange.max_tokens, lambda: describe(op, "topk_ids", text, rows.topk_ids.shape))


def _bind_dispatch(
    hidden_states: Tensor,
    hidden_states_scale: Tensor | None,
    topk_ids: Tensor,
    topk_weights: Tensor,
    transport: str,
    group: str,
    world_size: int,
    max_tokens: int,
    slots: Any = (),
    capacity: int = 0,
) -> tuple[Rows, str, Exchange]:
    """The arguments, checked."""
    rows = Rows(hidden_states, hidden_states_scale, topk_ids, topk_weights)
    exchange = Exchange(group, world_size, max_tokens, tuple(slots), capacity)
    _check_dispatch(rows, transport, exchange)
    return rows, transport, exchange


def _with_scale(rows: Rows, positions: Tensor) -> Dispatched:
    """An absent scale as an empty tensor: an op returns tensors."""
    x = rows.hidden_states
    scale = x.new_empty((0, 0), dtype=torch.uint8) if rows.scale is None else rows.scale
    return x, scale, rows.topk_ids, rows.topk_weights, positions


def _dispatch(*args: Any, **kwargs: Any) -> Dispatched:
    try:
        rows, transport, exchange = _bind_dispatch(*args, **kwargs)
    except RuntimeError as error:
        raise RuntimeError(f"{error}{ALONE}") from None
    x, capacity = rows.hidden_states, exchange.capacity
    if capacity and x.is_cuda and torch.cuda.is_current_stream_capturing():
        fail("ep_dispatch", "capacity", "be 0 in a CUDA graph: an overflow is told by the host", capacity)
    check_group("ep_dispatch", "world_size", exchange.group, exchange.world_size)
    with like_a_kernel(x.device.type):
        return _with_scale(*TRANSPORTS[transport].dispatch(rows, exchange))


def _dispatch_fake(*args: Any, **kwargs: Any) -> Dispatched:
    rows, _, exchange = _bind_dispatch(*args, **kwargs)
    received = rows.like([t.new_empty((exchange.rows, t.shape[1])) for t in rows.present()])
    tokens = rows.topk_ids.shape[0] if exchange.capacity else 0
    return _with_scale(received, rows.topk_ids.new_empty((tokens, exchange.world_size), dtype=torch.int32))


def _check_combine(partial_rows: Tensor, transport: str, exchange: Exchange, how: Combine) -> None:
    op = "ep_combine"
    for name, t in (("partial_rows", partial_rows), ("positions", how.positions)):
        check_given(op, name, t)
    check_exchange(op, transport, exchange)
    if partial_rows.ndim != 2 or partial_rows.dtype not in FLOATS:
        text = f"be [rows, hidden_size] of one of the dtypes {[str(d) for d in FLOATS]}"
        fail(op, "partial_rows", text, f"{partial_rows.dtype} {tuple(partial_rows.shape)}")
    rows = f"have {exchange.rows} rows, {exchange.rows_of_a_rank} for each rank"
    check(partial_rows.shape[0] == exchange.rows, lambda: describe(op, "partial_rows", rows, partial_rows.shape))
    positions, tokens = how.positions, how.num_tokens if exchange.capacity else 0
    if positions.ndim != 2 or positions.dtype != torch.int32 or positions.shape[1] != exchange.world_size:
        text = f"be an int32 tensor [num_tokens, {exchange.world_size}]"
        fail(op, "positions", text, f"{positions.dtype} {tuple(positions.shape)}")
    placed = f"have {tokens} rows"
    check(positions.shape[0] == tokens, lambda: describe(op, "positions", placed, positions.shape))
    if positions.device != partial_rows.device:
        fail(op, "positions", f"be on {partial_rows.device} like partial_rows", positions.device)
    if how.out_dtype not in FLOATS:
        fail(op, "out_dtype", f"be one of {[str(d) for d in FLOATS]}", how.out_dtype)
    if how.wire_dtype is not None and how.wire_dtype not in WIRE_DTYPES:
        fail(op, "wire_dtype", f"be None or one of {[str(d) for d in WIRE_DTYPES]}", how.wire_dtype)
    most = f"be at most max_tokens = {exchange.max_tokens}"
    check(how.num_tokens <= exchange.max_tokens, lambda: describe(op, "num_tokens", most, how.num_tokens))
    check(how.num_tokens >= 0, lambda: describe(op, "num_tokens", "be at least 0", how.num_tokens))


def _bind_combine(
    partial_rows: Tensor,
    positions: Tensor,
    num_tokens: int,
    transport: str,
    group: str,
    world_size: int,
    max_tokens: int,
    out_dtype: torch.dtype,
    slots: Any = (),
    capacity: int = 0,
    tp_group: str = "",
    tp_size: int = 1,
    wire_dtype: torch.dtype | None = None,
) -> tuple[Tensor, str, Exchange, Combine]:
    """The arguments, checked."""
    exchange = Exchange(group, world_size, max_tokens, tuple(slots), capacity)
    how = Combine(positions, num_tokens, out_dtype, tp_group, tp_size, wire_dtype)
    _check_combine(partial_rows, transport, exchange, how)
    return partial_rows, transport, exchange, how


def _combine(*args: Any, **kwargs: Any) -> Tensor:
    try:
        rows, transport, exchange, how = _bind_combine(*args, **kwargs)
    except RuntimeError as error:
        raise RuntimeError(f"{error}{ALONE}") from None
    check_group("ep_combine", "world_size", exchange.group, exchange.world_size)
    if how.tp_group:
        check_group("ep_combine", "tp_size", how.tp_group, how.tp_size)
    with like_a_kernel(rows.device.type):
        return TRANSPORTS[transport].combine(rows.contiguous(), exchange, how)


def _combine_fake(*args: Any, **kwargs: Any) -> Tensor:
    rows, _, _, how = _bind_combine(*args, **kwargs)
    return rows.new_empty((how.num_tokens, rows.shape[1]), dtype=how.out_dtype)


attach("ep_place", _place, _place, _place_fake)
attach("ep_dispatch", _dispatch, _dispatch, _dispatch_fake)
attach("ep_combine", _combine, _combine, _combine_fake)
