"""The op `moeq::ep_experts`: every routed op with the exchange of expert parallelism around it.

One op for all schemes. It is `ep_place`, `ep_dispatch`, the scheme's routed op and `ep_combine`; where transport and
backend can, the experts read the tokens of other ranks, and write their partial rows, by themselves (p2p.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_moe_ops.backends.registry import RemoteExperts
from torch_moe_ops.core.call import FIELDS, ExpertsCall
from torch_moe_ops.core.check import check, describe, fail
from torch_moe_ops.core.schemas import arguments
from torch_moe_ops.core.schemes import FLOATS, SCHEMES
from torch_moe_ops.ops import run
from torch_moe_ops.ops.bind import attach, like_a_kernel
from torch_moe_ops.ops.checks import check_experts, check_topk
from torch_moe_ops.ops.expert_parallel import check_exchange, check_group, check_place
from torch_moe_ops.ops.plan import Plan, Table, plan_of
from torch_moe_ops.transports import p2p
from torch_moe_ops.transports.exchange import ALONE, Combine, Exchange, Rows
from torch_moe_ops.transports.placing import place
from torch_moe_ops.transports.registry import TRANSPORTS

OP = "ep_experts"
NAMES, _DEFAULTS = arguments(OP)


class Tables(NamedTuple):
    """Of placing.py."""

    first: Tensor
    count: Tensor  # type: ignore[assignment]
    slots: Tensor
    load: Tensor


class _Checked(NamedTuple):
    call: ExpertsCall  # on this rank's tokens, by ids of the router
    tables: Tables
    rank: int
    transport: str
    exchange: Exchange
    partial_dtype: torch.dtype
    plan: Plan
    table: Table

    def result(self) -> Tensor:
        x = self.call.hidden_states
        return x.new_empty((x.shape[0], self.table.hidden_size), dtype=run.out_dtype(self.call))


def _checked(args: tuple[Any, ...], kwargs: dict[str, Any], devices: bool, tracing: bool) -> _Checked:
    given = {**dict(zip(NAMES, (*args, *_DEFAULTS[len(args) :]), strict=True)), **kwargs}
    values: list[Any] = [given.get(name) for name in FIELDS]  # no hidden_states_scale
    call = ExpertsCall(*values)
    if call.scheme not in SCHEMES:
        fail(OP, "scheme", f"be one of {list(SCHEMES)}", call.scheme)
    if given["partial_dtype"] not in FLOATS:
        fail(OP, "partial_dtype", f"be one of {[str(d) for d in FLOATS]}", given["partial_dtype"])
    exchange = Exchange(given["group"], given["world_size"], given["max_tokens"], tuple(given["slots_of_ranks"]))
    check_exchange(OP, given["transport"], exchange)
    if len(exchange.slots) != exchange.world_size:
        fail(OP, "slots_of_ranks", f"have an element for each of {exchange.world_size} ranks", exchange.slots)
    plan = plan_of(OP, call)
    table = check_experts(OP, call, plan, devices, tracing)
    check_topk(OP, call)
    tables = Tables(*(given[name] for name in Tables._fields))
    check_place(call.topk_ids, *tables, given["rank"], OP)
    text = f"have at most max_tokens = {exchange.max_tokens} rows"
    tokens = call.topk_ids.shape[0]
    check(tokens <= exchange.max_tokens, lambda: describe(OP, "topk_ids", text, call.topk_ids.shape))
    return _Checked(call, tables, given["rank"], given["transport"], exchange, given["partial_dtype"], plan, table)


def _run(found: _Checked) -> Tensor:
    call, exchange = found.call, found.exchange
    check_group(OP, "world_size", exchange.group, exchange.world_size)
    torch._C._increment_version((found.tables.load,))
    with like_a_kernel(call.hidden_states.device.type):
        remote = found.plan.backend.remote
        if found.transport == "p2p" and remote is not None:
            around = p2p.around(call, exchange, found.partial_dtype)
            if around is not None:
                return _remote(found, around, remote)
        return _in_steps(_placed(found))


def _remote(found: _Checked, around: p2p.Around, remote: RemoteExperts) -> Tensor:
    in_kernel = found.call.topk_ids.dtype == torch.int32
    given = found if in_kernel else _placed(found)
    call = run.with_aligned(run.completed(given.call, found.plan, found.table, found.partial_dtype), None)[0]
    arguments, places = around.stage(call, found.tables if in_kernel else ())
    remote.run(*arguments)
    return around.add(arguments.parts, places, found.result())


def _placed(found: _Checked) -> _Checked:
    places = place(found.call.topk_ids, *found.tables, found.rank)
    return found._replace(call=found.call._replace(topk_ids=places))


def _in_steps(found: _Checked) -> Tensor:
    call, transport = found.call, TRANSPORTS[found.transport]
    rows, positions = transport.dispatch(
        Rows(call.hidden_states, None, call.topk_ids, call.topk_weights.to(torch.float32)), found.exchange
    )
    received = call._replace(
        hidden_states=rows.hidden_states,
        topk_ids=rows.topk_ids,
        topk_weights=rows.topk_weights,
        out_dtype=found.partial_dtype,
    )
    partial_rows = run.output(received, found.table.hidden_size)
    run.run_experts(received, found.plan, found.table, partial_rows)
    how = Combine(positions, call.hidden_states.shape[0], run.out_dtype(call))
    return transport.combine(partial_rows, found.exchange, how)


def _make(devices: bool) -> Callable[..., Tensor]:
    def impl(*args: Any, **kwargs: Any) -> Tensor:
        try:
            found = _checked(args, kwargs, devices, tracing=False)
        except RuntimeError as error:
            raise RuntimeError(f"{error}{ALONE}") from None
        return _run(found)

    return impl


def _fake(*args: Any, **kwargs: Any) -> Tensor:
    return _checked(args, kwargs, devices=True, tracing=True).result()


attach(OP, _make(devices=False), _make(devices=True), _fake)
