"""Argument checks of the expert ops, shared by implementations and fakes.

What the strings and the shapes of the weights decide is computed once and kept (plan.py); a call then
compares shapes and dtypes against it, which takes 4 us for an op of 27 arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.core.check import check, check_given, describe, fail
from torch_moe_ops.core.schemes import FLOATS
from torch_moe_ops.ops.plan import Plan, Table, check_dtype, check_tensor, keep, make_table, or_bytes


def check_experts(op: str, call: ExpertsCall, plan: Plan, devices: bool, tracing: bool = False) -> Table:
    """Check everything but names and routing. Returns what followed from the weights.

    devices: compare devices too (not needed under the CPU dispatch key).
    tracing: sizes may be symbolic, which have no hash: the table is then made anew.
    """
    x, w13, w2 = call.hidden_states, call.w13, call.w2
    if x is None or w13 is None or w2 is None:
        for name in ("hidden_states", "w13", "w2"):
            check_given(op, name, getattr(call, name))
    shape = x.shape
    if call.hidden_states_scale is None and len(shape) == 2 and x.dtype in plan.hidden_dtypes:
        hidden_size, packed = shape[1], False
    else:
        hidden_size, packed = _check_hidden(op, call, plan)
    if tracing:
        table = make_table(op, call, plan, hidden_size, packed)
    else:
        key = (w13.shape, w2.shape, w13.dtype, w2.dtype, hidden_size, packed)
        found = plan.tables.get(key)
        table = found or keep(plan.tables, key, make_table(op, call, plan, hidden_size, packed))
    for tensor, (name, shapes, dtypes, required) in zip(table.pick(call), table.specs):  # noqa: B905 (hot)
        if tensor is None:
            if required:
                fail(op, name, f"be a Tensor of shape {shapes[0]}", None)
        elif tensor.shape not in shapes or tensor.dtype not in dtypes:
            check_tensor(op, name, shapes, dtypes, tensor)
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
    return table


def _check_unusual(op: str, call: ExpertsCall, plan: Plan) -> None:
    """What only some schemes and activation formats have to obey."""
    w13, x = call.w13, call.hidden_states
    if plan.scheme.name == "none" and w13.dtype is not x.dtype:
        fail(op, "w13", f"have dtype {x.dtype} like hidden_states", w13.dtype)
    if plan.act.name not in plan.scheme.static_acts:
        for name, gscale in (("a1_gscale", call.a1_gscale), ("a2_gscale", call.a2_gscale)):
            if gscale is not None:
                fail(op, name, f"be None for act_format {plan.act.name!r}", gscale.shape)
    s13, s2 = call.w13_scale, call.w2_scale
    if plan.backend.layout.pads_hidden and s13 is not None and s2 is not None and s13.dtype is not s2.dtype:
        fail(op, "w13_scale", f"have dtype {s2.dtype} like w2_scale (tiles have one form of scales)", s13.dtype)
    pairs = (("w13", call.w13_zero_point, call.w13_scale), ("w2", call.w2_zero_point, call.w2_scale))
    for name, zero_point, scale in pairs:
        if zero_point is not None and plan.backend.layout.pads_hidden:
            fail(
                op,
                f"{name}_zero_point",
                f"be None: {plan.backend.name!r} has those of tiles in {name}_scale",
                zero_point.shape,
            )
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
    check_dtype(op, "hidden_states", or_bytes((act.dtype,)), x, " (packed, as hidden_states_scale is given)")
    hidden_size = x.shape[1] * act.pack
    expected = (x.shape[0], plan.scheme.act_scale_columns(act, hidden_size))
    check(scale.shape == expected, lambda: describe(op, "hidden_states_scale", f"have shape {expected}", scale.shape))
    check_dtype(op, "hidden_states_scale", or_bytes((act.scale_dtype,)), scale)
    if act.name == "nvfp4" and call.a1_gscale is None:
        fail(op, "a1_gscale", "be given where hidden_states are packed (the scale they were quantized with)", None)
    return hidden_size, True


def _fail_contiguous(op: str, call: ExpertsCall) -> None:
    """Small arguments are made contiguous; a copy of these at every call would be slow and go unnoticed."""
    for name in ("w13", "w13_scale", "w13_zero_point", "w2", "w2_scale", "w2_zero_point"):
        tensor = getattr(call, name)
        if tensor is not None and not tensor.is_contiguous():
            fail(op, name, "be contiguous", f"strides {tensor.stride()}")


def _check_devices(op: str, call: ExpertsCall) -> None:
    device = call.hidden_states.device
    for name, value in zip(call._fields, call, strict=True):
        if isinstance(value, Tensor) and value.device != device:
            fail(op, name, f"be on {device} like hidden_states", value.device)


def check_topk(op: str, call: ExpertsCall) -> Any:
    """topk_ids and topk_weights of a routed op, and the weight on the input. Returns the number of tokens."""
    ids, weights = call.topk_ids, call.topk_weights
    if ids is None or weights is None:
        check_given(op, "topk_ids", ids)
        check_given(op, "topk_weights", weights)
    if ids.dtype is not torch.int32:
        fail(op, "topk_ids", "have dtype torch.int32 (fused_moe_routed also takes torch.int64)", ids.dtype)
    if weights.dtype is not torch.float32:
        text = "have dtype torch.float32 (fused_moe_routed also takes other float dtypes)"
        fail(op, "topk_weights", text, weights.dtype)
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
    check_given(op, "out", out)
    check(out.shape == shape, lambda: describe(op, "out", f"have shape {shape}", out.shape))
    if out.dtype != dtype:
        fail(op, "out", f"have dtype {dtype}", out.dtype)
    if out.device != device:
        fail(op, "out", f"be on {device} like hidden_states", out.device)
    if not out.is_contiguous():
        fail(op, "out", "be contiguous", f"strides {out.stride()}")
    if out.is_inference() and not torch.is_inference_mode_enabled():
        fail(op, "out", "be no inference tensor outside inference mode, which nothing may write", "an inference tensor")
