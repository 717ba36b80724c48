"""Argument checks of the expert ops, shared by implementations and fakes.

What the strings and the shapes of the weights decide is computed once and kept (`Plan`); a call then
compares shapes and dtypes against it, which takes 4 us for an op of 27 arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_moe_ops._check import check, describe, fail
from torch_moe_ops.activations import ACTIVATIONS, check_activation
from torch_moe_ops.backends.registry import BACKENDS, Backend, Sizes, Spec
from torch_moe_ops.ops.call import INDEX, ExpertsCall
from torch_moe_ops.schemes import ACT_FORMATS, FLOATS, SCHEMES, ZERO_POINT_DTYPES, ActFormat, Scheme


class _Spec(NamedTuple):
    """What one scale, alpha or bias argument must be."""

    name: str
    shapes: tuple[tuple[int, ...], ...]  # allowed ones
    dtypes: tuple[torch.dtype, ...]  # allowed ones
    required: bool = False


class _Table(NamedTuple):
    """The arguments that follow from w13, w2 and the hidden size: which ones, and what each must be."""

    num_experts: int
    pick: Callable[[ExpertsCall], tuple[Tensor | None, ...]]
    specs: tuple[tuple[Any, ...], ...]  # of _Spec, as plain tuples: unpacking those takes half the time


@dataclass(frozen=True, eq=False)
class Plan:
    """What the names and constants of a call resolve to, and the tables made for it so far."""

    backend: Backend
    scheme: Scheme
    act: ActFormat
    is_gated: bool
    alpha: float
    beta: float
    limit: float
    unusual: bool  # more to check than shapes and dtypes
    hidden_dtypes: tuple[torch.dtype, ...]
    # (shape of w13, shape of w2, dtype, hidden size, packed) -> what the other arguments must be
    tables: dict[tuple[Any, ...], _Table] = field(default_factory=dict)


_PLANS: dict[tuple[Any, ...], Plan] = {}
_names_of = itemgetter(
    *(INDEX[n] for n in ("scheme", "backend", "act_format", "activation", "swiglu_alpha")),
    *(INDEX[n] for n in ("swiglu_beta", "swiglu_limit", "weight_policy")),
)


def plan_of(op: str, call: ExpertsCall) -> Plan:
    """Check the arguments that are names or constants. What passed once is looked up; errors are not kept."""
    names = _names_of(call)
    found = _PLANS.get(names)
    return found if found is not None else _PLANS.setdefault(names, _resolve(op, call))


def _resolve(op: str, call: ExpertsCall) -> Plan:
    scheme = SCHEMES[call.scheme]
    if call.backend not in BACKENDS:
        fail(op, "backend", f"be one of {list(BACKENDS)}", call.backend)
    if call.act_format not in scheme.act_formats:
        fail(op, "act_format", f"be one of {list(scheme.act_formats)}", call.act_format)
    policies = scheme.policies if call.act_format == "fp8" else ("exact",)
    if call.weight_policy not in policies:
        requirement = f"be one of {list(policies)} for scheme {scheme.name!r} and act_format {call.act_format!r}"
        fail(op, "weight_policy", requirement, call.weight_policy)
    name = call.activation
    constants = check_activation(op, name, call.swiglu_alpha, call.swiglu_beta, call.swiglu_limit)
    unusual = scheme.name == "none" or scheme.has_zero_point or call.act_format not in scheme.static_acts
    act, gated, backend = ACT_FORMATS[call.act_format], ACTIVATIONS[name].is_gated, BACKENDS[call.backend]
    return Plan(backend, scheme, act, gated, *constants, unusual, backend.hidden_dtypes)


_F32 = (torch.float32,)


def _specs(plan: Plan, expected: dict[str, Spec], sizes: Sizes, packed: bool) -> list[_Spec]:
    """What every scale, alpha and bias argument must be for given sizes.

    packed: the hidden states were quantized once, so one input scale serves all experts.
    """
    experts, hidden, inter = sizes.num_experts, sizes.hidden_size, sizes.intermediate_size
    halves = 2 if sizes.is_gated else 1
    biases = {"w13_bias": (((experts, halves * inter),), _F32), "w2_bias": (((experts, hidden),), _F32)}
    weights = {name: spec for name, spec in expected.items() if name not in biases}
    specs = [_Spec(name, *spec, required=True) for name, spec in weights.items() if name not in ("w13", "w2")]
    if plan.scheme.has_zero_point:
        dtypes = (ZERO_POINT_DTYPES[plan.scheme.name],)
        specs += [_Spec(f"{n}_zero_point", expected[f"{n}_scale"][0], dtypes) for n in ("w13", "w2")]
    if plan.scheme.has_scale_2:
        specs.append(_Spec("g1_alphas", ((experts,), (experts, halves)), _F32, required=True))
        specs.append(_Spec("g2_alphas", ((experts,),), _F32, required=True))
    if plan.act.name in plan.scheme.static_acts:
        specs.append(_Spec("a1_gscale", ((),) if packed else ((), (experts,)), _F32))
        specs.append(_Spec("a2_gscale", ((), (experts,)), _F32))
    specs += [_Spec(name, *expected.get(name, usual)) for name, usual in biases.items()]
    return specs


def check_experts(op: str, call: ExpertsCall, plan: Plan, devices: bool, tracing: bool = False) -> int:
    """Check everything but names and routing. Returns the hidden size.

    devices: compare devices too (not needed under the CPU dispatch key).
    tracing: sizes may be symbolic, which have no hash: the table is then made anew.
    """
    x, w13, w2 = call.hidden_states, call.w13, call.w2
    shape = x.shape
    if call.hidden_states_scale is None and len(shape) == 2 and x.dtype in plan.hidden_dtypes:
        hidden_size, packed = shape[1], False
    else:
        hidden_size, packed = _check_hidden(op, call, plan)
    key = (w13.shape, w2.shape, w13.dtype, hidden_size, packed)
    table = None if tracing else plan.tables.get(key)
    if table is None:
        table = _make_table(op, call, plan, hidden_size, packed)
        if not tracing:
            plan.tables[key] = table
    for tensor, (name, shapes, dtypes, required) in zip(table.pick(call), table.specs):  # noqa: B905 (hot)
        if tensor is None:
            if required:
                fail(op, name, f"be a Tensor of shape {shapes[0]}", None)
        elif tensor.shape not in shapes or tensor.dtype not in dtypes:
            _fail_tensor(op, name, shapes, dtypes, tensor)
    s13, s2 = call.w13_scale, call.w2_scale
    if not (
        w13.is_contiguous()
        and w2.is_contiguous()
        and (s13 is None or s13.is_contiguous())
        and (s2 is None or s2.is_contiguous())
    ):
        _fail_contiguous(op, call)
    if plan.unusual:
        _check_unusual(op, call, plan)
    offset, total = call.local_expert_offset, call.num_experts
    if offset < 0 or (total and offset + table.num_experts > total) or call.out_dtype not in _OUT_DTYPES:
        _fail_range(op, call, table.num_experts)
    if devices:
        _check_devices(op, call)
    return hidden_size


def _check_unusual(op: str, call: ExpertsCall, plan: Plan) -> None:
    """What only some schemes and activation formats have to obey."""
    w13, x = call.w13, call.hidden_states
    if plan.scheme.name == "none" and w13.dtype is not x.dtype:
        fail(op, "w13", f"have dtype {x.dtype} like hidden_states", w13.dtype)
    if plan.act.name not in plan.scheme.static_acts:
        for name, gscale in (("a1_gscale", call.a1_gscale), ("a2_gscale", call.a2_gscale)):
            if gscale is not None:
                fail(op, name, f"be None for act_format {plan.act.name!r}", gscale.shape)
    pairs = (("w13", call.w13_zero_point, call.w13_scale), ("w2", call.w2_zero_point, call.w2_scale))
    for name, zero_point, scale in pairs:
        if zero_point is not None and scale is not None and zero_point.shape != scale.shape:
            text = f"have shape {tuple(scale.shape)} like {name}_scale"
            fail(op, f"{name}_zero_point", text, zero_point.shape)
    _fail_contiguous(op, call)


_OUT_DTYPES = (None, *FLOATS)


def _fail_range(op: str, call: ExpertsCall, experts: int) -> None:
    offset, total, out_dtype = call.local_expert_offset, call.num_experts, call.out_dtype
    if offset < 0:
        fail(op, "local_expert_offset", "be at least 0", offset)
    if out_dtype not in _OUT_DTYPES:
        fail(op, "out_dtype", f"be None or one of {[str(d) for d in FLOATS]}", out_dtype)
    fail(op, "num_experts", f"be 0 or at least local_expert_offset + local experts = {offset + experts}", total)


def _check_hidden(op: str, call: ExpertsCall, plan: Plan) -> tuple[int, bool]:
    """Hidden states, unquantized or packed. Returns the hidden size and whether they are packed."""
    x, scale, act = call.hidden_states, call.hidden_states_scale, plan.act
    if x.layout != torch.strided:
        fail(op, "hidden_states", "be strided", x.layout)
    if x.ndim != 2:
        fail(op, "hidden_states", "have shape [num_tokens, hidden_size]", x.shape)
    if scale is None:
        allowed = plan.hidden_dtypes
        if x.dtype not in allowed:
            text = f"have one of the dtypes {[str(d) for d in allowed]} (packed ones need hidden_states_scale)"
            fail(op, "hidden_states", text, x.dtype)
        return x.shape[1], False
    if act.dtype is None:
        fail(op, "hidden_states_scale", f"be None for act_format {act.name!r}", scale.shape)
    if x.dtype != act.dtype:
        fail(op, "hidden_states", f"have dtype {act.dtype} (packed, as hidden_states_scale is given)", x.dtype)
    hidden_size = x.shape[1] * act.pack
    expected = (x.shape[0], plan.scheme.act_scale_columns(act, hidden_size))
    check(scale.shape == expected, lambda: describe(op, "hidden_states_scale", f"have shape {expected}", scale.shape))
    if scale.dtype != act.scale_dtype:
        fail(op, "hidden_states_scale", f"have dtype {act.scale_dtype}", scale.dtype)
    if act.name == "nvfp4" and call.a1_gscale is None:
        fail(op, "a1_gscale", "be given where hidden_states are packed (the scale they were quantized with)", None)
    return hidden_size, True


def _make_table(op: str, call: ExpertsCall, plan: Plan, hidden_size: int, packed: bool) -> _Table:
    """Check w13 and w2, and say what all other weight arguments must be."""
    scheme, w13, w2 = plan.scheme, call.w13, call.w2
    dtypes = plan.backend.layout.weight_dtypes(scheme)
    if w13.dtype not in dtypes:
        allowed = " or ".join(str(d) for d in dtypes)
        fail(op, "w13", f"have dtype {allowed}", w13.dtype)
    if w13.ndim < 3 or not w13.shape[0]:
        fail(op, "w13", "have at least 3 dimensions and one expert", w13.shape)
    if w2.ndim < 3:
        fail(op, "w2", "have at least 3 dimensions", w2.shape)
    inter = plan.backend.layout.intermediate_size(scheme, tuple(w2.shape))
    for name, size in (("hidden_size", hidden_size), ("intermediate_size", inter)):
        if size <= 0 or size % scheme.size_multiple:
            fail(op, name, f"be a positive multiple of {scheme.size_multiple}", size)
    _check_hidden_size(op, call, plan, hidden_size)
    sizes = Sizes(w13.shape[0], hidden_size, inter, plan.is_gated, w13.dtype)
    expected = plan.backend.layout.specs(scheme, sizes)
    for name, tensor in (("w13", w13), ("w2", w2)):
        shapes, dtypes = expected[name]
        if tensor.shape not in shapes or tensor.dtype not in dtypes:
            _fail_tensor(op, name, shapes, dtypes, tensor)
    specs = _specs(plan, expected, sizes, packed)
    pick = itemgetter(*(INDEX[spec.name] for spec in specs))
    return _Table(w13.shape[0], pick, tuple(tuple(spec) for spec in specs))


def _check_hidden_size(op: str, call: ExpertsCall, plan: Plan, hidden_size: int) -> None:
    """Where both weights agree on another hidden size, the hidden states are wrong, not the weights."""
    if plan.backend.layout.name != "linear_v1" or call.w2.ndim != 3 or call.w13.ndim != 3:
        return
    rows = call.w2.shape[1]
    if plan.scheme.logical_k(call.w13.shape[2]) == rows != hidden_size:
        fail(op, "hidden_states", f"have hidden_size {rows} (rows of w2)", hidden_size)


def _fail_contiguous(op: str, call: ExpertsCall) -> None:
    """Small arguments are made contiguous; a copy of these at every call would be slow and go unnoticed."""
    for name in ("w13", "w13_scale", "w13_zero_point", "w2", "w2_scale", "w2_zero_point"):
        tensor = getattr(call, name)
        if tensor is not None and not tensor.is_contiguous():
            fail(op, name, "be contiguous", f"strides {tensor.stride()}")


def _fail_tensor(
    op: str, name: str, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...], tensor: Tensor
) -> None:
    if tensor.dtype not in dtypes:
        fail(op, name, f"have dtype {' or '.join(str(d) for d in dtypes)}", tensor.dtype)
    fail(op, name, f"have shape {' or '.join(dict.fromkeys(str(s) for s in shapes))}", tensor.shape)


def _check_devices(op: str, call: ExpertsCall) -> None:
    device = call.hidden_states.device
    for name, value in zip(call._fields, call, strict=True):
        if isinstance(value, Tensor) and value.device != device:
            fail(op, name, f"be on {device} like hidden_states", value.device)


def check_topk(op: str, call: ExpertsCall) -> Any:
    """topk_ids and topk_weights of a routed op, and the weight on the input. Returns the number of tokens."""
    ids, weights = call.topk_ids, call.topk_weights
    if ids.dtype is not torch.int32:
        fail(op, "topk_ids", "have dtype torch.int32", ids.dtype)
    if weights.dtype is not torch.float32:
        fail(op, "topk_weights", "have dtype torch.float32", weights.dtype)
    shape, rows = ids.shape, call.hidden_states.shape[0]
    if len(shape) != 2 or shape[1] < 1:
        fail(op, "topk_ids", "have shape [num_tokens, top_k] with top_k at least 1", shape)
    fits = shape[0] == rows
    if fits is not True:  # False, or symbolic
        check(fits, lambda: describe(op, "topk_ids", f"have num_tokens = {rows} rows like hidden_states", shape))
    other = weights.shape
    fits = len(other) == 2 and other[1] == shape[1] and other[0] == shape[0]
    if fits is not True:
        check(fits, lambda: describe(op, "topk_weights", f"have shape {tuple(shape)} like topk_ids", other))
    if call.router_weight_on_input:
        check_weighted_input(op, call)
        if shape[1] != 1:
            fail(op, "router_weight_on_input", "be False unless top_k is 1", f"top_k = {shape[1]}")
    return shape[0]


def check_weighted_input(op: str, call: ExpertsCall) -> None:
    """The routing weight goes on the token before it is quantized."""
    if call.hidden_states_scale is not None:
        text = "be unquantized where the router weight goes on the input"
        fail(op, "hidden_states", text, call.hidden_states.dtype)


def check_out(op: str, out: Tensor, shape: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> None:
    """The buffer of an `.out` overload."""
    check(out.shape == shape, lambda: describe(op, "out", f"have shape {shape}", out.shape))
    if out.dtype != dtype:
        fail(op, "out", f"have dtype {dtype}", out.dtype)
    if out.device != device:
        fail(op, "out", f"be on {device} like hidden_states", out.device)
    if not out.is_contiguous():
        fail(op, "out", "be contiguous", f"strides {out.stride()}")
