"""The expert ops: `<scheme>_moe_routed`, `<scheme>_moe_routed.out`, `<scheme>_moe` for every scheme.

One body serves all schemes: it binds the arguments to an ExpertsCall, checks them, allocates, and
calls the backend that the caller named. The fake runs the same code up to the allocation.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.core.call import FIELDS, ExpertsCall
from torch_moe_ops.core.check import check, describe, fail
from torch_moe_ops.core.schemas import FAMILIES, arguments
from torch_moe_ops.ops.alignment import ALIGNMENT, aligned, is_aligned
from torch_moe_ops.ops.bind import attach, like_a_kernel
from torch_moe_ops.ops.checks import check_experts, check_out, check_topk, check_weighted_input
from torch_moe_ops.ops.plan import Plan, Table, plan_of
from torch_moe_ops.ops.route import run_route
from torch_moe_ops.routing.options import check_route
from torch_moe_ops.routing.reference import route_reference


class _Binder:
    """Turns the positional arguments of one op into an ExpertsCall, plus what the op has besides."""

    def __init__(self, op: str, family: str):
        schemes = FAMILIES[family]
        scheme = schemes[0]
        self.names, self.defaults = arguments(op)
        self.position = {name: i for i, name in enumerate(self.names)}
        # Fields that the op lacks are read from two constants appended to the arguments.
        absent, zero = len(self.names), len(self.names) + 1
        extra = {"scheme": zero, "act_format": zero + 1, "router_weight_on_input": zero + 2}
        self.pick = itemgetter(*(self.position.get(f, extra.get(f, absent)) for f in FIELDS))
        self.tail = (*self.defaults, None, scheme.name, scheme.act_formats[0], False)
        # A family with several elements says by an argument which scheme is meant.
        self.elements = {s.element: s.name for s in schemes} if len(schemes) > 1 else {}
        self.op = op

    def fill(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """All arguments in schema order, then the constants."""
        full = args + self.tail[len(args) :]
        if not kwargs:
            return full
        filled = list(full)
        for name, value in kwargs.items():
            filled[self.position[name]] = value
        return tuple(filled)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExpertsCall:
        """The arguments of one call."""
        full = self.fill(args, kwargs) if kwargs else args + self.tail[len(args) :]
        return self.call(full) if self.elements else tuple.__new__(ExpertsCall, self.pick(full))

    def call(self, full: tuple[Any, ...]) -> ExpertsCall:
        call = tuple.__new__(ExpertsCall, self.pick(full))
        return self._named(call, full[self.position["element"]]) if self.elements else call

    def _named(self, call: ExpertsCall, element: str) -> ExpertsCall:
        if element not in self.elements:
            fail(self.op, "element", f"be one of {list(self.elements)}", element)
        return call._replace(scheme=self.elements[element])


def _output(call: ExpertsCall, hidden_size: int) -> Tensor:
    x, dtype = call.hidden_states, call.out_dtype
    if call.hidden_states_scale is None and (dtype is None or dtype is x.dtype):
        # Twice as fast as new_empty, the more so without an argument.
        return torch.empty_like(x) if x.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format)
    return x.new_empty((x.shape[0], hidden_size), dtype=_out_dtype(call))


def _out_dtype(call: ExpertsCall) -> torch.dtype:
    """As asked; else the dtype of unquantized hidden states, bfloat16 for packed ones."""
    if call.out_dtype is not None:
        return call.out_dtype
    return call.hidden_states.dtype if call.hidden_states_scale is None else torch.bfloat16


_MADE_CONTIGUOUS = (
    "hidden_states",
    "hidden_states_scale",
    "topk_ids",
    "topk_weights",
    "g1_alphas",
    "w13_bias",
    "g2_alphas",
    "w2_bias",
    "a1_gscale",
    "a2_gscale",
)


def _run(call: ExpertsCall, plan: Plan, table: Table, out: Tensor, routing: tuple[Any, ...] | None = None) -> None:
    """Run a checked call on at least one token. routing: the arguments of moeq::route, for a monolithic call."""
    if out.is_cuda:
        call, routing = _with_aligned(call, routing)
        if not is_aligned(out):
            copy = torch.empty_like(out)
            _run(call, plan, table, copy, routing)
            out.copy_(copy)
            return
    small = {name: t.contiguous() for name in _MADE_CONTIGUOUS if (t := getattr(call, name)) is not None}
    for name in table.e4m3:
        codes = small.get(name, getattr(call, name))
        if codes.dtype is torch.uint8:
            small[name] = codes.view(torch.float8_e4m3fn)
    ready = call._replace(
        **small,
        swiglu_alpha=plan.alpha,
        swiglu_beta=plan.beta,
        swiglu_limit=plan.limit,
        out_dtype=out.dtype,
    )
    with like_a_kernel(out.device.type):
        if routing is not None:
            whole = plan.backend.run_monolithic
            if whole is not None and whole(ready, routing, out):
                return
            # The oracle stays torch from end to end.
            choose = route_reference if plan.backend.name == "reference" else run_route
            ids, weights = choose(*routing)
            ready = ready._replace(topk_ids=ids, topk_weights=weights)
        plan.backend.run(ready, out)


_TENSORS = (*(n for n in FIELDS if n.startswith(("hidden", "topk", "w13", "w2", "g1", "g2", "a1", "a2"))),)
_tensors_of = itemgetter(*(FIELDS.index(n) for n in _TENSORS))


def _with_aligned(call: ExpertsCall, routing: tuple[Any, ...] | None) -> tuple[ExpertsCall, tuple[Any, ...] | None]:
    """The same values where kernels can load them. Copies of weights at every call are slow, and rare: no allocator of
    torch gives such addresses, only a view from the middle of a tensor has them."""
    if routing is not None:
        routing = (*(t if t is None else aligned(t) for t in routing[:2]), *routing[2:])  # logits and bias
    for tensor in _tensors_of(call):
        if tensor is not None and tensor.data_ptr() % ALIGNMENT:
            break
    else:
        return call, routing
    moved: dict[str, Any] = {
        name: aligned(t) for name, t in zip(_TENSORS, _tensors_of(call), strict=True) if t is not None
    }
    return call._replace(**moved), routing


_NOTHING: dict[str, Any] = {}  # keywords: the dispatcher passes everything by position

Checked = Callable[..., tuple[ExpertsCall, Plan, Table]]


def _define_routed(family: str) -> None:
    op = f"{family}_moe_routed" if family else "moe_routed"
    binder = _Binder(op, family)

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
            out = _output(call, table.hidden_size)
            if num_tokens:
                _run(call, plan, table, out)
            return out

        return impl

    def fake(*args: Any, **kwargs: Any) -> Tensor:
        call, _, table = checked(args, kwargs, True, tracing=True)
        return _output(call, table.hidden_size)

    attach(op, make(devices=False), make(devices=True), fake)
    _define_out(op, checked)


def _define_out(op: str, checked: Checked) -> None:
    def prepared(
        args: Any, kwargs: Any, devices: bool, tracing: bool = False
    ) -> tuple[ExpertsCall, Plan, Table, Tensor]:
        out = kwargs.pop("out")
        call, plan, table = checked(args, kwargs, devices, tracing)
        x = call.hidden_states
        check_out(op, out, (x.shape[0], table.hidden_size), _out_dtype(call), x.device)
        return call, plan, table, out

    def make(devices: bool) -> Callable[..., None]:
        def impl(*args: Any, **kwargs: Any) -> None:
            call, plan, table, out = prepared(args, kwargs, devices)
            for name, value in zip(FIELDS, call, strict=True):
                if isinstance(value, Tensor) and torch._C._overlaps(out, value):
                    fail(op, "out", "not share memory with an argument", name)
            torch._C._increment_version((out,))  # what autograd has saved of it is stale now
            if out.shape[0]:
                _run(call, plan, table, out)

        return impl

    def fake(*args: Any, **kwargs: Any) -> None:
        prepared(args, kwargs, True, tracing=True)

    attach(f"{op}.out", make(devices=False), make(devices=True), fake)


_ROUTE_ARGUMENTS = (
    "routing_method",
    "top_k",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    "renormalize",
)


def _define_monolithic(family: str) -> None:
    op = f"{family}_moe" if family else "moe"
    binder = _Binder(op, family)
    logits_at, bias_at = binder.position["router_logits"], binder.position["routing_bias"]
    route_at = [binder.position[name] for name in _ROUTE_ARGUMENTS]

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
            out = _output(call, table.hidden_size)
            if out.shape[0]:
                _run(call, plan, table, out, routing)
            return out

        return impl

    def fake(*args: Any, **kwargs: Any) -> Tensor:
        call, _, table, _ = checked(args, kwargs, True, tracing=True)
        return _output(call, table.hidden_size)

    attach(op, make(devices=False), make(devices=True), fake)


for _family in FAMILIES:
    _define_routed(_family)
    _define_monolithic(_family)
