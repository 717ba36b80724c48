"""The op `moeq::moe_hidden`: router and experts of a layer, from its hidden states and its router's weights.

One op for all schemes: `moeq::route_hidden` and the scheme's routed op, with its results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_moe_ops.core.call import FIELDS, ExpertsCall
from torch_moe_ops.core.check import fail
from torch_moe_ops.core.schemas import arguments
from torch_moe_ops.core.schemes import SCHEMES
from torch_moe_ops.ops import run
from torch_moe_ops.ops.bind import attach, like_a_kernel
from torch_moe_ops.ops.checks import check_experts, check_weighted_input
from torch_moe_ops.ops.derivatives import ROUTE_OPTIONS
from torch_moe_ops.ops.plan import Plan, Table, plan_of
from torch_moe_ops.ops.route_hidden import check_devices, check_product, run_router
from torch_moe_ops.routing.options import check_route

OP = "moe_hidden"
NAMES, _DEFAULTS = arguments(OP)
Results = tuple[Tensor, Tensor, Tensor, Tensor]


class _Checked(NamedTuple):
    call: ExpertsCall  # without ids and weights
    weight: Tensor
    bias: Tensor | None
    routing: tuple[Any, ...]  # of moeq::route, behind the logits
    logits_dtype: torch.dtype
    plan: Plan
    table: Table

    def logits(self) -> Tensor:
        """Room for them."""
        shape = (self.call.hidden_states.shape[0], self.weight.shape[0])
        return self.call.hidden_states.new_empty(shape, dtype=self.logits_dtype)

    def chosen(self) -> tuple[Tensor, Tensor]:
        """Room for ids and weights."""
        x, shape = self.call.hidden_states, (self.call.hidden_states.shape[0], self.routing[2])
        return x.new_empty(shape, dtype=torch.int32), x.new_empty(shape, dtype=torch.float32)


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(NAMES, (*args, *_DEFAULTS[len(args) :]), strict=True)), **kwargs}


def _checked(given: dict[str, Any], devices: bool, tracing: bool) -> _Checked:
    weight, bias, dtype = given["router_weight"], given["router_bias"], given["logits_dtype"] or torch.float32
    x, correction = given["hidden_states"], given["routing_bias"]
    check_product(OP, x, weight, bias, dtype)
    values: list[Any] = [given.get(name) for name in FIELDS]  # no scale of hidden states, no ids
    call = ExpertsCall(*values)._replace(router_weight_on_input=given["routing_method"] == "llama4")
    experts = weight.shape[0]
    if call.num_experts not in (0, experts):
        fail(OP, "num_experts", f"be 0 or {experts}, the rows of router_weight", call.num_experts)
    named, call = call.num_experts, call._replace(num_experts=experts)
    if call.scheme not in SCHEMES:
        fail(OP, "scheme", f"be one of {list(SCHEMES)}", call.scheme)
    plan = plan_of(OP, call)
    table = check_experts(OP, call, plan, devices, tracing)
    if not named and table.num_experts != experts:
        text = f"be {experts}, the rows of router_weight, where only {table.num_experts} experts are local"
        fail(OP, "num_experts", text, named)
    if call.router_weight_on_input:
        check_weighted_input(OP, call)
    routing = (correction, *(given[name] for name in ROUTE_OPTIONS))
    found = _Checked(call, weight, bias, routing, dtype, plan, table)
    check_route(OP, found.logits(), *routing)
    if devices:
        check_devices(OP, x, router_weight=weight, router_bias=bias, routing_bias=correction)
    return found


def _run(found: _Checked) -> Results:
    call, plan = found.call, found.plan
    out = run.output(call, found.table.hidden_size)
    if not out.shape[0]:
        return out, *found.chosen(), found.logits()
    with like_a_kernel(out.device.type):
        operands = (call.hidden_states, found.weight, found.bias)
        ids, weights, logits = run_router(*operands, found.routing, found.logits_dtype)
    run.run_experts(call._replace(topk_ids=ids, topk_weights=weights), plan, found.table, out)
    return out, ids, weights, logits


def _make(devices: bool) -> Callable[..., Results]:
    return lambda *args, **kwargs: _run(_checked(_given(args, kwargs), devices, tracing=False))


def _fake(*args: Any, **kwargs: Any) -> Results:
    found = _checked(_given(args, kwargs), devices=True, tracing=True)
    return run.output(found.call, found.table.hidden_size), *found.chosen(), found.logits()


def _parts(*args: Any) -> Results:
    """As the two ops, which have derivatives."""
    given = _given(args, {})
    found = _checked(given, devices=True, tracing=True)
    route = [given[name] for name in ("hidden_states", "router_weight", "router_bias", "routing_bias", *ROUTE_OPTIONS)]
    ids, weights, logits = torch.ops.moeq.route_hidden(*route, found.logits_dtype)
    scheme = SCHEMES[found.call.scheme]
    op = f"{scheme.op_prefix}moe_routed"
    routed = {**found.call._asdict(), "topk_ids": ids, "topk_weights": weights, "element": scheme.element}
    return getattr(torch.ops.moeq, op)(*(routed[name] for name in arguments(op)[0])), ids, weights, logits


attach(OP, _make(devices=False), _make(devices=True), _fake, parts=_parts)
