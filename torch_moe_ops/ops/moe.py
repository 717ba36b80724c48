"""The monolithic ops of router and experts, `nvfp4_moe` and its like (schemas: core/schemas.py).

As the routed ones (moe_routed.py), with the router's options checked and its logits beside the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.core.check import check, describe, fail
from torch_moe_ops.core.schemas import SCHEMAS
from torch_moe_ops.ops import run
from torch_moe_ops.ops.bind import attach
from torch_moe_ops.ops.binder import Binder
from torch_moe_ops.ops.checks import check_experts, check_weighted_input
from torch_moe_ops.ops.derivatives import ROUTE_OPTIONS, routed_parts
from torch_moe_ops.ops.plan import Plan, Table, plan_of
from torch_moe_ops.routing.options import check_route


def define(op: str) -> None:
    """Body and fake of a monolithic op."""
    binder = Binder(op)
    logits_at, bias_at = binder.position["router_logits"], binder.position["routing_bias"]
    route_at = [binder.position[name] for name in ROUTE_OPTIONS]

    def checked(
        args: Any, kwargs: Any, devices: bool, tracing: bool = False
    ) -> tuple[ExpertsCall, Plan, Table, tuple[Any, ...]]:
        full = binder.fill(args, kwargs)
        logits, bias, options = full[logits_at], full[bias_at], tuple(full[i] for i in route_at)
        check_route(op, logits, bias, *options)
        call = binder.call(full)
        experts = logits.shape[1]
        if call.num_experts not in (0, experts):
            fail(op, "num_experts", f"be 0 or {experts}, the columns of router_logits", call.num_experts)
        given, call = call.num_experts, call._replace(num_experts=experts)
        plan = plan_of(op, call)
        table = check_experts(op, call, plan, devices, tracing)
        if not given and table.num_experts != experts:
            text = f"be {experts}, the columns of router_logits, where only {table.num_experts} experts are local"
            fail(op, "num_experts", text, given)
        if options[0] == "llama4":
            check_weighted_input(op, call)
            call = call._replace(router_weight_on_input=True)
        rows = call.hidden_states.shape[0]
        check(
            logits.shape[0] == rows,
            lambda: describe(op, "router_logits", f"have num_tokens = {rows} rows like hidden_states", logits.shape),
        )
        if devices:
            for name, tensor in (("router_logits", logits), ("routing_bias", bias)):
                if tensor is not None and tensor.device != call.hidden_states.device:
                    fail(op, name, f"be on {call.hidden_states.device} like hidden_states", tensor.device)
        return call, plan, table, (logits, bias, *options)

    def make(devices: bool) -> Callable[..., Tensor]:
        def impl(*args: Any, **kwargs: Any) -> Tensor:
            call, plan, table, routing = checked(args, kwargs, devices)
            out = run.output(call, table.hidden_size)
            if out.shape[0]:
                run.run_experts(call, plan, table, out, routing)
            return out

        return impl

    def fake(*args: Any, **kwargs: Any) -> Tensor:
        call, _, table, _ = checked(args, kwargs, True, tracing=True)
        return run.output(call, table.hidden_size)

    def check_whole(args: Any) -> None:
        checked(args, {}, True, tracing=True)

    attach(op, make(devices=False), make(devices=True), fake, parts=routed_parts(op, binder, check_whole))


for _op in SCHEMAS:
    if _op.endswith("moe"):
        define(_op)
