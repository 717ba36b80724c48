"""The op `moeq::moe_routed_backward`: the gradients of every routed op, whatever its scheme.

Its arguments are the gradient of the output, the call that was made, as an ExpertsCall has it, and which gradients are
wanted. Checked as the routed op was.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

from torch import Tensor

from torch_moe_ops.core.call import FIELDS, INDEX, ExpertsCall
from torch_moe_ops.core.check import check, check_given, describe, fail
from torch_moe_ops.core.layout import Sizes
from torch_moe_ops.core.schemas import arguments
from torch_moe_ops.core.schemes import FLOATS, SCHEMES
from torch_moe_ops.gradients.experts import Wanted, experts_gradients
from torch_moe_ops.ops.bind import attach, like_a_kernel
from torch_moe_ops.ops.checks import check_experts, check_topk
from torch_moe_ops.ops.plan import Plan, Table, plan_of
from torch_moe_ops.ops.run import completed

OP = "moe_routed_backward"
NAMES, _DEFAULTS = arguments(OP)
_call_of = itemgetter(*map(NAMES.index, FIELDS))
_of_call = itemgetter(*(INDEX[name] for name in NAMES[1:-1]))  # between the gradient and what is wanted


def arguments_of(grad: Tensor, call: ExpertsCall, wanted: Wanted) -> tuple[Any, ...]:
    """The op's arguments."""
    return grad, *_of_call(call), list(wanted)


def _checked(
    args: tuple[Any, ...], kwargs: dict[str, Any], devices: bool, tracing: bool
) -> tuple[Tensor, ExpertsCall, Plan, Table, Wanted]:
    full = [*args, *_DEFAULTS[len(args) :]]
    for name, value in kwargs.items():
        full[NAMES.index(name)] = value
    grad, flags = full[0], full[-1]
    call = ExpertsCall._make(_call_of(full))
    check_given(OP, "grad_output", grad)
    if call.scheme not in SCHEMES:
        fail(OP, "scheme", f"be one of {list(SCHEMES)}", call.scheme)
    plan = plan_of(OP, call)
    table = check_experts(OP, call, plan, devices, tracing)
    check_topk(OP, call)
    check_grad(OP, grad, call, table.hidden_size, devices)
    if len(flags) != len(Wanted._fields):
        fail(OP, "wanted", f"have {len(Wanted._fields)} values, for {', '.join(Wanted._fields)}", flags)
    wanted = Wanted(*flags)
    for name, is_wanted in zip(Wanted._fields, wanted, strict=True):
        if is_wanted and getattr(call, name) is None:
            fail(OP, name, "be given where its gradient is wanted", None)
    if wanted.hidden_states and call.hidden_states_scale is not None:
        fail(OP, "hidden_states", "be unquantized where their gradient is wanted", call.hidden_states.dtype)
    return grad, call, plan, table, wanted


def check_grad(op: str, grad: Tensor, call: ExpertsCall, hidden_size: int, devices: bool) -> None:
    """The gradient of a routed op's output."""
    shape = (call.hidden_states.shape[0], hidden_size)
    check(grad.shape == shape, lambda: describe(op, "grad_output", f"have shape {shape}", grad.shape))
    if grad.dtype not in FLOATS:
        fail(op, "grad_output", f"have one of the dtypes {[str(d) for d in FLOATS]}", grad.dtype)
    if devices and grad.device != call.hidden_states.device:
        fail(op, "grad_output", f"be on {call.hidden_states.device} like hidden_states", grad.device)


def like_arguments(x: Tensor, names: tuple[str, ...], tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Results: by name like the tensors whose gradients they are, empty where there is none."""
    return tuple(
        x.new_empty(tensors[name].shape, dtype=tensors[name].dtype) if name in tensors else x.new_empty(0, dtype=_F32)
        for name in names
    )


def handed_on(made: Tensor | None, like: Tensor | None, x: Tensor) -> Tensor:
    """The result for `like`, an argument: the gradient that a pass made, of which nobody else knows, or its numbers in
    another tensor where it is not as the argument is. None: empty.
    """
    if like is None:
        return x.new_empty(0, dtype=_F32)
    if made is not None and made.dtype is like.dtype and made.shape == like.shape and made.is_contiguous():
        return made
    result = x.new_empty(like.shape, dtype=like.dtype)
    return result if made is None else result.copy_(made)


def _asked(call: ExpertsCall, wanted: Wanted) -> dict[str, Tensor]:
    """By name the arguments whose gradients are wanted."""
    return {name: getattr(call, name) for name, is_wanted in zip(Wanted._fields, wanted, strict=True) if is_wanted}


_F32 = FLOATS[2]


def _make(devices: bool) -> Callable[..., tuple[Tensor, ...]]:
    def impl(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        grad, call, plan, table, wanted = _checked(args, kwargs, devices, tracing=False)
        x, asked = call.hidden_states, _asked(call, wanted)
        if not call.topk_ids.shape[0]:
            return tuple(result.zero_() for result in like_arguments(x, Wanted._fields, asked))
        scheme, layout = plan.scheme, plan.backend.layout
        call = completed(call, plan, table, call.out_dtype or grad.dtype)
        inter = layout.intermediate_size(scheme, tuple(call.w2.shape))
        sizes = Sizes(table.num_experts, table.hidden_size, inter, plan.is_gated, call.w13.dtype)
        with like_a_kernel(grad.device.type):
            found = experts_gradients(call, plan.backend, sizes, grad, wanted)
            return tuple(handed_on(made, asked.get(name), x) for name, made in zip(Wanted._fields, found, strict=True))

    return impl


def _fake(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    _, call, _, _, wanted = _checked(args, kwargs, devices=True, tracing=True)
    return like_arguments(call.hidden_states, Wanted._fields, _asked(call, wanted))


attach(OP, _make(devices=False), _make(devices=True), _fake)
