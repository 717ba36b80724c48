"""Argument checks of the expert ops, shared by implementations and fakes.

What the strings and the weight shapes decide is computed once and cached (`plan`, `_weight_specs`);
a call then compares shapes and dtypes against it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_moe_ops._check import check, describe, fail
from torch_moe_ops.activations import ACTIVATIONS, check_activation
from torch_moe_ops.backends.registry import BACKENDS, Backend, Sizes
from torch_moe_ops.ops.call import INDEX, ExpertsCall
from torch_moe_ops.schemes import ACT_FORMATS, FLOATS, SCHEMES, ActFormat, Scheme


class Plan(NamedTuple):
    """What the plain string and float arguments of a call resolve to."""

    backend: Backend
    scheme: Scheme
    act: ActFormat
    is_gated: bool
    alpha: float
    beta: float
    limit: float


@cache
def plan(
    op: str,
    scheme_name: str,
    backend: str,
    act_format: str,
    activation: str,
    alpha: float | None,
    beta: float | None,
    limit: float | None,
    weight_policy: str,
) -> Plan:
    """Check the arguments that are names or constants of one op; errors are not cached."""
    scheme = SCHEMES[scheme_name]
    if backend not in BACKENDS:
        fail(op, "backend", f"be one of {list(BACKENDS)}", backend)
    if act_format not in scheme.act_formats:
        fail(op, "act_format", f"be one of {list(scheme.act_formats)}", act_format)
    if weight_policy != "exact":
        fail(op, "weight_policy", "be 'exact' (other policies belong to fp8 activations on 4-bit weights)", weight_policy)
    constants = check_activation(op, activation, alpha, beta, limit)
    return Plan(
        BACKENDS[backend], scheme, ACT_FORMATS[act_format], ACTIVATIONS[activation].is_gated, *constants
    )


class _Spec(NamedTuple):
    index: int  # into ExpertsCall
    name: str
    shapes: tuple[tuple[int, ...], ...]  # allowed ones
    dtype: torch.dtype
    required: bool


@cache
def _weight_specs(
    scheme: Scheme, layout_of: str, sizes: Sizes, single_input_scale: bool
) -> tuple[_Spec, ...]:
    """Shape and dtype of every weight, scale and bias argument for given sizes."""
    experts, hidden, inter = sizes.num_experts, sizes.hidden_size, sizes.intermediate_size
    halves = 2 if sizes.is_gated else 1
    specs = [
        _Spec(INDEX[name], name, (shape,), dtype, True)
        for name, (shape, dtype) in BACKENDS[layout_of].layout.specs(scheme, sizes).items()
    ]

    def add(name: str, *shapes: tuple[int, ...], required: bool = False) -> None:
        specs.append(_Spec(INDEX[name], name, shapes, torch.float32, required))

    if scheme.has_scale_2:
        add("g1_alphas", (experts,), (experts, halves), required=True)
        add("g2_alphas", (experts,), required=True)
        add("a1_gscale", *(((),) if single_input_scale else ((), (experts,))))
        add("a2_gscale", (), (experts,))
    add("w13_bias", (experts, halves * inter))
    add("w2_bias", (experts, hidden))
    return tuple(specs)


def check_experts(op: str, call: ExpertsCall, devices: bool) -> tuple[Plan, int]:
    """Check everything but the routing arguments. Returns the plan and the hidden size.

    devices: compare devices too (not needed under the CPU dispatch key).
    """
    resolved = plan(
        op,
        call.scheme,
        call.backend,
        call.act_format,
        call.activation,
        call.swiglu_alpha,
        call.swiglu_beta,
        call.swiglu_limit,
        call.weight_policy,
    )
    hidden_size, packed = _check_hidden(op, call, resolved)
    experts = _check_weights(op, call, resolved, hidden_size, packed)
    if call.out_dtype is not None and call.out_dtype not in FLOATS:
        fail(op, "out_dtype", f"be None or one of {[str(d) for d in FLOATS]}", call.out_dtype)
    offset = call.local_expert_offset
    if offset < 0:
        fail(op, "local_expert_offset", "be at least 0", offset)
    if call.num_experts and not offset + experts <= call.num_experts:
        fail(op, "num_experts", f"be 0 or at least local_expert_offset + local experts = {offset + experts}", call.num_experts)
    if devices:
        _check_devices(op, call)
    return resolved, hidden_size


def _check_hidden(op: str, call: ExpertsCall, resolved: Plan) -> tuple[int, bool]:
    """Hidden states, unquantized or packed. Returns the hidden size and whether they are packed."""
    x, scale, act = call.hidden_states, call.hidden_states_scale, resolved.act
    if x.ndim != 2:
        fail(op, "hidden_states", "have shape [num_tokens, hidden_size]", x.shape)
    if scale is None:
        allowed = resolved.backend.hidden_dtypes
        if x.dtype not in allowed:
            text = f"have one of the dtypes {[str(d) for d in allowed]} (packed ones need hidden_states_scale)"
            fail(op, "hidden_states", text, x.dtype)
        return x.shape[1], False
    if act.dtype is None:
        fail(op, "hidden_states_scale", f"be None for act_format {act.name!r}", scale.shape)
    if x.dtype != act.dtype:
        fail(op, "hidden_states", f"have dtype {act.dtype} (packed, as hidden_states_scale is given)", x.dtype)
    hidden_size = x.shape[1] * act.pack
    expected = (x.shape[0], hidden_size // act.block)
    check(scale.shape == expected, lambda: describe(op, "hidden_states_scale", f"have shape {expected}", scale.shape))
    if scale.dtype != act.scale_dtype:
        fail(op, "hidden_states_scale", f"have dtype {act.scale_dtype}", scale.dtype)
    if call.a1_gscale is None:
        fail(op, "a1_gscale", "be given where hidden_states are packed (the scale they were quantized with)", None)
    return hidden_size, True


def _check_weights(op: str, call: ExpertsCall, resolved: Plan, hidden_size: int, packed: bool) -> int:
    """Weights, scales, alphas and biases. Returns the number of local experts."""
    scheme, w13, w2 = resolved.scheme, call.w13, call.w2
    if w13.dtype not in scheme.weight_dtypes:
        allowed = " or ".join(str(d) for d in scheme.weight_dtypes)
        fail(op, "w13", f"have dtype {allowed}", w13.dtype)
    if w13.ndim < 3 or not w13.shape[0]:
        fail(op, "w13", "have at least 3 dimensions and one expert", w13.shape)
    if w2.ndim < 3:
        fail(op, "w2", "have at least 3 dimensions", w2.shape)
    inter = resolved.backend.layout.intermediate_size(scheme, tuple(w2.shape))
    for name, size in (("hidden_size", hidden_size), ("intermediate_size", inter)):
        if size <= 0 or size % scheme.size_multiple:
            fail(op, name, f"be a positive multiple of {scheme.size_multiple}", size)
    if scheme.name == "none" and w13.dtype != call.hidden_states.dtype:
        fail(op, "w13", f"have dtype {call.hidden_states.dtype} like hidden_states", w13.dtype)
    sizes = Sizes(w13.shape[0], hidden_size, inter, resolved.is_gated, w13.dtype)
    # Traced sizes can be symbolic, which has no hash: the table is then made anew.
    symbolic = any(isinstance(n, torch.SymInt) for n in (w13.shape[0], hidden_size, inter))
    table = _weight_specs.__wrapped__ if symbolic else _weight_specs
    for spec in table(scheme, resolved.backend.name, sizes, packed):
        tensor = call[spec.index]
        if tensor is None:
            if spec.required:
                fail(op, spec.name, f"be a Tensor of shape {spec.shapes[0]}", None)
        elif tensor.shape not in spec.shapes or tensor.dtype is not spec.dtype or not tensor.is_contiguous():
            _fail_tensor(op, spec, tensor)
    return w13.shape[0]


def _fail_tensor(op: str, spec: _Spec, tensor: Tensor) -> None:
    if tensor.dtype != spec.dtype:
        fail(op, spec.name, f"have dtype {spec.dtype}", tensor.dtype)
    if tuple(tensor.shape) not in spec.shapes:
        shapes = " or ".join(dict.fromkeys(str(s) for s in spec.shapes))
        fail(op, spec.name, f"have shape {shapes}", tensor.shape)
    fail(op, spec.name, "be contiguous", f"strides {tensor.stride()}")


def _check_devices(op: str, call: ExpertsCall) -> None:
    device = call.hidden_states.device
    for name, value in zip(call._fields, call, strict=True):
        if isinstance(value, Tensor) and value.device != device:
            fail(op, name, f"be on {device} like hidden_states", value.device)


def check_topk(op: str, call: ExpertsCall) -> None:
    """topk_ids and topk_weights of a routed op, and the weight on the input."""
    ids, weights, x = call.topk_ids, call.topk_weights, call.hidden_states
    if ids.dtype != torch.int32:
        fail(op, "topk_ids", "have dtype torch.int32", ids.dtype)
    if weights.dtype != torch.float32:
        fail(op, "topk_weights", "have dtype torch.float32", weights.dtype)
    if ids.ndim != 2 or ids.shape[1] < 1:
        fail(op, "topk_ids", "have shape [num_tokens, top_k] with top_k at least 1", ids.shape)
    check(
        ids.shape[0] == x.shape[0],
        lambda: describe(op, "topk_ids", f"have num_tokens = {x.shape[0]} rows like hidden_states", ids.shape),
    )
    check(
        weights.shape == ids.shape,
        lambda: describe(op, "topk_weights", f"have shape {tuple(ids.shape)} like topk_ids", weights.shape),
    )
    if call.router_weight_on_input and ids.shape[1] != 1:
        fail(op, "router_weight_on_input", "be False unless top_k is 1", f"top_k = {ids.shape[1]}")


def check_out(op: str, out: Tensor, shape: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> None:
    """The buffer of an `.out` overload."""
    check(out.shape == shape, lambda: describe(op, "out", f"have shape {shape}", out.shape))
    if out.dtype != dtype:
        fail(op, "out", f"have dtype {dtype}", out.dtype)
    if out.device != device:
        fail(op, "out", f"be on {device} like hidden_states", out.device)
    if not out.is_contiguous():
        fail(op, "out", "be contiguous", f"strides {out.stride()}")
