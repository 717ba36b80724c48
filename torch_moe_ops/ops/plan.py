"""What a call's names and the sizes of its weights demand of its other arguments, computed once and remembered.

Everything that decides what is demanded is part of a key; whatever is not is compared at every call (checks.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torch_moe_ops.backends.registry import BACKENDS, Backend
from torch_moe_ops.core.activations import ACTIVATIONS, check_activation
from torch_moe_ops.core.call import INDEX, ExpertsCall
from torch_moe_ops.core.check import fail
from torch_moe_ops.core.layout import Sizes, Spec
from torch_moe_ops.core.problem import Problem
from torch_moe_ops.core.schemes import ACT_FORMATS, SCHEMES, ZERO_POINT_DTYPES, ActFormat, Scheme

MAX_KEPT = 512  # plans, and tables of a plan: far more than a process has layers that differ
_E4M3 = torch.float8_e4m3fn
_Kept = TypeVar("_Kept")


class Table(NamedTuple):
    """The arguments that follow from w13, w2 and the hidden size: which ones, and what each must be."""

    num_experts: int
    hidden_size: int
    pick: Callable[[ExpertsCall], tuple[Tensor | None, ...]]
    specs: tuple[tuple[Any, ...], ...]  # of _Spec, as plain tuples: unpacking those takes half the time
    e4m3: tuple[str, ...]  # arguments that hold e4m3 codes, which may come as bytes


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
    # (shapes of w13 and w2, their dtypes, hidden size, packed) -> what the other arguments must be
    tables: dict[tuple[Any, ...], Table] = field(default_factory=dict)


class _Spec(NamedTuple):
    """What one scale, alpha or bias argument must be."""

    name: str
    shapes: tuple[tuple[int, ...], ...]  # allowed ones
    dtypes: tuple[torch.dtype, ...]  # allowed ones
    required: bool = False


_PLANS: dict[tuple[Any, ...], Plan] = {}
_names_of = itemgetter(
    *(INDEX[n] for n in ("scheme", "backend", "act_format", "activation", "swiglu_alpha")),
    *(INDEX[n] for n in ("swiglu_beta", "swiglu_limit", "weight_policy")),
)


def plan_of(op: str, call: ExpertsCall) -> Plan:
    """Check the arguments that are names or constants. What passed once is looked up; errors are not kept."""
    names = _names_of(call)
    found = _PLANS.get(names)
    return found if found is not None else keep(_PLANS, names, _resolve(op, call))


def make_table(op: str, call: ExpertsCall, plan: Plan, hidden_size: int, packed: bool) -> Table:
    """Check w13 and w2, and say what all other weight arguments must be.

    packed: the hidden states were quantized once, so one input scale serves all experts.
    """
    scheme, w13, w2 = plan.scheme, call.w13, call.w2
    declared = plan.backend.layout.weight_dtypes(scheme)
    check_dtype(op, "w13", or_bytes(declared), w13)
    if w13.ndim < 3 or not w13.shape[0]:
        fail(op, "w13", "have at least 3 dimensions and one expert", w13.shape)
    if w2.ndim < 3:
        fail(op, "w2", "have at least 3 dimensions", w2.shape)
    inter = plan.backend.layout.intermediate_size(scheme, tuple(w2.shape))
    for name, size in (("hidden_size", hidden_size), ("intermediate_size", inter)):
        if size <= 0 or size % scheme.size_multiple:
            fail(op, name, f"be a positive multiple of {scheme.size_multiple}", size)
    _check_hidden_size(op, call, plan, hidden_size)
    weight_dtype = w13.dtype if w13.dtype in declared else _E4M3
    experts = w13.shape[0]
    if plan.backend.layout.pads_hidden:  # it counts tiles: of sizes that are traced as symbols, numbers
        experts, hidden_size, inter = int(experts), int(hidden_size), int(inter)
    sizes = Sizes(experts, hidden_size, inter, plan.is_gated, weight_dtype)
    expected = plan.backend.layout.specs(scheme, sizes)
    for name, tensor in (("w13", w13), ("w2", w2)):
        shapes, stored = expected[name]
        check_dtype(op, name, or_bytes(stored), tensor)
        if tensor.shape not in shapes:  # of a prepared layer it is rather the hidden states that are wrong
            where = f" in layout {plan.backend.layout.name} for hidden_states of hidden_size {hidden_size}"
            fail(op, name, f"have shape {_any_of(shapes)}{where}", tensor.shape)
    specs = _specs(plan, expected, sizes, packed)
    pick = itemgetter(*(INDEX[spec.name] for spec in specs))
    given = {"hidden_states": (plan.act.dtype,), "hidden_states_scale": (plan.act.scale_dtype,)} if packed else {}
    dtypes = given | {name: dtypes for name, (_, dtypes) in expected.items()}
    e4m3 = tuple(name for name, allowed in dtypes.items() if _E4M3 in allowed)
    return Table(w13.shape[0], hidden_size, pick, tuple(tuple(spec) for spec in specs), e4m3)


def keep(kept: dict[tuple[Any, ...], _Kept], key: tuple[Any, ...], value: _Kept) -> _Kept:
    """Remember `value`, in bounded memory: a full dictionary starts anew, which no other thread can be hurt by."""
    if len(kept) >= MAX_KEPT:
        kept.clear()
    return kept.setdefault(key, value)


def _resolve(op: str, call: ExpertsCall) -> Plan:
    scheme = SCHEMES[call.scheme]
    if call.backend not in BACKENDS:
        fail(op, "backend", f"be one of {list(BACKENDS)}", call.backend)
    if call.act_format not in scheme.act_formats:
        fail(op, "act_format", f"be one of {list(scheme.act_formats)}", call.act_format)
    problem = Problem(scheme.name, call.act_format)
    unfit = [why for r in BACKENDS[call.backend].requires if r.of_format and (why := r.unmet(problem)) is not None]
    if unfit:
        fail(op, "backend", f"run {scheme.name} weights with act_format {call.act_format!r} ({unfit[0]})", call.backend)
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
    """What every scale, alpha and bias argument must be for given sizes."""
    experts, hidden, inter = sizes.num_experts, sizes.hidden_size, sizes.intermediate_size
    halves = 2 if sizes.is_gated else 1
    biases = {"w13_bias": (((experts, halves * inter),), _F32), "w2_bias": (((experts, hidden),), _F32)}
    weights = {name: spec for name, spec in expected.items() if name not in biases}
    scales = {name: spec for name, spec in weights.items() if name not in ("w13", "w2")}
    specs = [_Spec(name, shapes, or_bytes(dtypes), required=True) for name, (shapes, dtypes) in scales.items()]
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


def or_bytes(dtypes: tuple[torch.dtype, ...]) -> tuple[torch.dtype, ...]:
    """e4m3 codes may come as bytes, for tools that know no float8."""
    return (*dtypes, torch.uint8) if _E4M3 in dtypes else dtypes


def _check_hidden_size(op: str, call: ExpertsCall, plan: Plan, hidden_size: int) -> None:
    """Where both weights agree on another hidden size, the hidden states are wrong, not the weights."""
    if plan.backend.layout.name != "linear_v1" or call.w2.ndim != 3 or call.w13.ndim != 3:
        return
    rows = call.w2.shape[1]
    if plan.scheme.logical_k(call.w13.shape[2]) == rows != hidden_size:
        fail(op, "hidden_states", f"have hidden_size {rows} (rows of w2)", hidden_size)


_ONE_SCALE = (
    " where hidden_states are packed: they were quantized before an expert was known, so one scale serves all"
    " (pass unquantized hidden_states, or prepare with an a13_input_scale of shape ())"
)


def check_tensor(
    op: str, name: str, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...], tensor: Tensor
) -> None:
    """Raise unless the tensor has one of the shapes and one of the dtypes."""
    check_dtype(op, name, dtypes, tensor)
    if tensor.shape not in shapes:
        why = _ONE_SCALE if name == "a1_gscale" and shapes == ((),) else ""
        fail(op, name, f"have shape {_any_of(shapes)}{why}", tensor.shape)


def check_dtype(op: str, name: str, dtypes: tuple[torch.dtype, ...], tensor: Tensor, why: str = "") -> None:
    """Raise unless the tensor has one of the dtypes."""
    if tensor.dtype not in dtypes:
        fail(op, name, f"have dtype {_any_of(dtypes)}{why}", tensor.dtype)


def _any_of(values: tuple[Any, ...]) -> str:
    return " or ".join(dict.fromkeys(str(value) for value in values))
