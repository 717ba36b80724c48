"""The routed expert ops, `nvfp4_moe_routed` and its like, and their `.out` overloads (schemas: core/schemas.py).

One body serves all schemes: it binds the arguments to an ExpertsCall, checks them, allocates, and runs the backend that
the caller named. The fake runs the same code up to the allocation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.core.call import FIELDS, ExpertsCall
from torch_moe_ops.core.check import fail
from torch_moe_ops.core.checked_calls import checked_by
from torch_moe_ops.core.schemas import SCHEMAS
from torch_moe_ops.ops import run
from torch_moe_ops.ops.bind import attach
from torch_moe_ops.ops.binder import Binder
from torch_moe_ops.ops.checks import check_experts, check_out, check_topk
from torch_moe_ops.ops.derivatives import routed_rule
from torch_moe_ops.ops.plan import Plan, Table, plan_of

_NOTHING: dict[str, Any] = {}  # keywords: the dispatcher passes everything by position

Checked = Callable[..., tuple[ExpertsCall, Plan, Table]]


def define(op: str) -> None:
    """Body and fake of a routed op and its `.out` overload."""
    binder = Binder(op)

    def checked(args: Any, kwargs: Any, devices: bool, tracing: bool = False) -> tuple[ExpertsCall, Plan, Table]:
        call = binder.bind(args, kwargs)
        plan = plan_of(op, call)
        table = check_experts(op, call, plan, devices, tracing)
        check_topk(op, call)
        return call, plan, table

    bind = binder.bind

    def make(devices: bool) -> Callable[..., Tensor]:
        def impl(*args: Any) -> Tensor:
            call = bind(args, _NOTHING)  # `checked`, without the cost of a call
            plan = plan_of(op, call)
            table = check_experts(op, call, plan, devices)
            num_tokens = check_topk(op, call)
            out = run.output(call, table.hidden_size)
            if num_tokens:
                run.run_experts(call, plan, table, out)
            return out

        return impl

    def fake(*args: Any, **kwargs: Any) -> Tensor:
        call, _, table = checked(args, kwargs, True, tracing=True)
        return run.output(call, table.hidden_size)

    attach(op, make(devices=False), make(devices=True), fake, rule=routed_rule(binder))
    define_out(op, checked)


def define_out(op: str, checked: Checked) -> None:
    def prepared(
        args: Any, kwargs: Any, devices: bool, tracing: bool = False
    ) -> tuple[ExpertsCall, Plan, Table, Tensor]:
        out = kwargs.pop("out")
        call, plan, table = checked(args, kwargs, devices, tracing)
        x = call.hidden_states
        check_out(op, out, (x.shape[0], table.hidden_size), run.out_dtype(call), x.device)
        return call, plan, table, out

    def make(devices: bool) -> Callable[..., None]:
        def impl(*args: Any, **kwargs: Any) -> None:
            call, plan, table, out = prepared(args, kwargs, devices)
            for name, value in zip(FIELDS, call, strict=True):
                if isinstance(value, Tensor) and torch._C._overlaps(out, value):
                    fail(op, "out", "not share memory with an argument", name)
            torch._C._increment_version((out,))  # what autograd has saved of it is stale now
            if out.shape[0]:
                run.run_experts(call, plan, table, out)

        return impl

    def fake(*args: Any, **kwargs: Any) -> None:
        prepared(args, kwargs, True, tracing=True)

    attach(f"{op}.out", make(devices=False), make(devices=True), fake)


def _checked(op: str, args: tuple[Any, ...], out: Tensor) -> tuple[ExpertsCall, ExpertsCall]:
    call = Binder(op).bind(args, _NOTHING)
    plan = plan_of(op, call)
    table = check_experts(op, call, plan, True)
    check_topk(op, call)
    return call, run.completed(call, plan, table, out.dtype)


checked_by(_checked)
for _op in SCHEMAS:
    if _op.endswith("moe_routed"):
        define(_op)
