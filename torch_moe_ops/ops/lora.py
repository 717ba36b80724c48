"""The ops `moeq::moe_routed_lora` and `moe_routed_lora_backward`: every routed op with adapters beside its experts.

One op for all schemes, as `moe_routed_backward` is, whose checks it shares. What it computes: gradients/lora_layer.py.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_moe_ops.core.call import FIELDS, ExpertsCall
from torch_moe_ops.core.check import check_given, fail
from torch_moe_ops.core.layout import Sizes
from torch_moe_ops.core.lora_checks import check_factors, check_ids, check_scaling, check_some_given
from torch_moe_ops.core.schemas import arguments
from torch_moe_ops.core.schemes import SCHEMES
from torch_moe_ops.gradients.lora import LoraArguments
from torch_moe_ops.gradients.lora_layer import WantedLora, lora_gradients, lora_layer
from torch_moe_ops.ops.autograd import Args, Rule
from torch_moe_ops.ops.backward import check_grad, handed_on, like_arguments
from torch_moe_ops.ops.bind import attach, like_a_kernel
from torch_moe_ops.ops.checks import check_experts, check_topk
from torch_moe_ops.ops.plan import Plan, Table, plan_of
from torch_moe_ops.ops.run import completed, out_dtype, run_experts

OP = "moe_routed_lora"
BACKWARD = f"{OP}_backward"
_OF_LORA = tuple(f"lora_{name}" for name in LoraArguments._fields)  # lora_merged comes last in the schema


class _Checked(NamedTuple):
    call: ExpertsCall
    lora: LoraArguments
    plan: Plan
    table: Table
    sizes: Sizes

    def completed(self) -> ExpertsCall:
        return completed(self.call, self.plan, self.table, out_dtype(self.call))


class _Arguments:
    """The arguments of one op, in its order."""

    def __init__(self, op: str) -> None:
        self.names, self.defaults = arguments(op)
        absent = len(self.names)  # hidden_states_scale: None is put behind the arguments
        self._at = {name: i for i, name in enumerate(self.names)}
        self._call_of = itemgetter(*(self._at.get(name, absent) for name in FIELDS))
        self._lora_of = itemgetter(*(self._at[name] for name in _OF_LORA))

    def fill(self, args: Args, kwargs: dict[str, Any]) -> Args:
        """All of them."""
        full = (*args, *self.defaults[len(args) :])
        if not kwargs:
            return full
        return tuple(kwargs.get(name, value) for name, value in zip(self.names, full, strict=True))

    def bind(self, full: Args) -> tuple[ExpertsCall, LoraArguments]:
        return ExpertsCall._make(self._call_of((*full, None))), LoraArguments._make(self._lora_of(full))

    def value(self, full: Args, name: str) -> Any:
        return full[self._at[name]]


def _checked(op: str, bound: tuple[ExpertsCall, LoraArguments], devices: bool, tracing: bool) -> _Checked:
    call, lora = bound
    if call.scheme not in SCHEMES:
        fail(op, "scheme", f"be one of {list(SCHEMES)}", call.scheme)
    plan = plan_of(op, call)
    table = check_experts(op, call, plan, devices, tracing)
    check_topk(op, call)
    inter = plan.backend.layout.intermediate_size(plan.scheme, tuple(call.w2.shape))
    sizes = Sizes(table.num_experts, table.hidden_size, inter, plan.is_gated, call.w13.dtype)
    found = _Checked(call, lora, plan, table, sizes)
    _check_lora(op, found)
    if devices:
        for name, value in zip(_OF_LORA, lora, strict=True):
            if isinstance(value, Tensor) and value.device != call.hidden_states.device:
                fail(op, name, f"be on {call.hidden_states.device} like hidden_states", value.device)
    return found


def _check_lora(op: str, found: _Checked) -> None:
    lora, sizes = found.lora, found.sizes
    check_scaling(op, lora.scaling)
    check_ids(op, lora.ids, found.call.hidden_states.shape[0], lora.scaling.shape[0])
    if lora.merged and (lora.ids is not None or lora.scaling.shape[0] != 1):
        got = f"{lora.scaling.shape[0]} adapters" + (" and lora_ids" if lora.ids is not None else "")
        fail(op, "lora_merged", "be False but for one adapter of all tokens", got)
    check_some_given(op, (lora.a13, lora.b13, lora.a2, lora.b2))
    width = _width(op, found, sizes)
    rows = (2 if sizes.is_gated else 1) * width
    check_factors(op, "13", lora.a13, lora.b13, lora.scaling.shape[0], (sizes.num_experts, rows, sizes.hidden_size))
    check_factors(op, "2", lora.a2, lora.b2, lora.scaling.shape[0], (sizes.num_experts, sizes.hidden_size, width))


def _width(op: str, found: _Checked, sizes: Sizes) -> int:
    """The intermediate size without the padding of a layout, which only the adapters say."""
    lora, padded = found.lora, sizes.intermediate_size
    halves = 2 if sizes.is_gated else 1
    if lora.a2 is not None and lora.a2.ndim == 3:
        width = lora.a2.shape[2]
    elif lora.b13 is not None and lora.b13.ndim == 3:
        width = lora.b13.shape[1] // halves
    else:
        return padded
    if width == padded or not 0 < width < padded:
        return padded
    backend, scheme = found.plan.backend, found.plan.scheme
    unpadded = Sizes(sizes.num_experts, sizes.hidden_size, width, sizes.is_gated, sizes.weight_dtype)
    fits = not width % scheme.size_multiple and all(
        tuple(getattr(found.call, name).shape) in backend.layout.specs(scheme, unpadded)[name][0]
        for name in ("w13", "w2")
    )
    return width if fits else padded


def _result(found: _Checked) -> Tensor:
    x = found.call.hidden_states
    return x.new_empty((x.shape[0], found.table.hidden_size), dtype=out_dtype(found.call))


def _make(devices: bool) -> Callable[..., Tensor]:
    def impl(*args: Any, **kwargs: Any) -> Tensor:
        found = _checked(OP, _FORWARD.bind(_FORWARD.fill(args, kwargs)), devices, tracing=False)
        x = found.call.hidden_states
        if found.lora.merged or not x.shape[0]:
            out = _result(found)
            if x.shape[0]:
                run_experts(found.call, found.plan, found.table, out)  # as without adapters, bit for bit
            return out
        with like_a_kernel(x.device.type):
            made = lora_layer(found.completed(), found.plan.backend, found.sizes, found.lora)
            same = made.dtype is out_dtype(found.call) and made.is_contiguous()
            return made if same else _result(found).copy_(made)

    return impl


def _fake(*args: Any, **kwargs: Any) -> Tensor:
    return _result(_checked(OP, _FORWARD.bind(_FORWARD.fill(args, kwargs)), devices=True, tracing=True))


_FORWARD, _BACKWARD_OP = _Arguments(OP), _Arguments(BACKWARD)
_AT = {name: _FORWARD.names.index(name) for name in WantedLora._fields}


def _backward(args: Args, results: Args, grads: tuple[Tensor, ...], needs: tuple[bool, ...]) -> dict[int, Tensor]:
    wanted = WantedLora(*(i < len(needs) and needs[i] for i in _AT.values()))
    full = _FORWARD.fill(args, {})
    found = torch.ops.moeq.moe_routed_lora_backward(grads[0], *full, list(wanted))
    return {at: gradient for at, gradient, asked in zip(_AT.values(), found, wanted, strict=True) if asked}


attach(OP, _make(devices=False), _make(devices=True), _fake, Rule(_backward, lambda at, args: at in _AT.values()))


def _checked_backward(args: Args, kwargs: dict[str, Any], devices: bool, tracing: bool) -> tuple[Any, ...]:
    full = _BACKWARD_OP.fill(args, kwargs)
    grad, flags = full[0], full[-1]
    check_given(BACKWARD, "grad_output", grad)
    found = _checked(BACKWARD, _BACKWARD_OP.bind(full), devices, tracing)
    check_grad(BACKWARD, grad, found.call, found.table.hidden_size, devices)
    if len(flags) != len(WantedLora._fields):
        fail(BACKWARD, "wanted", f"have {len(WantedLora._fields)} values, for {', '.join(WantedLora._fields)}", flags)
    wanted = WantedLora(*flags)
    asked = [name for name, is_wanted in zip(WantedLora._fields, wanted, strict=True) if is_wanted]
    tensors = {name: _BACKWARD_OP.value(full, name) for name in asked}
    for name, tensor in tensors.items():
        if tensor is None:
            fail(BACKWARD, name, "be given where its gradient is wanted", None)
    return grad, found, wanted, tensors


def _make_backward(devices: bool) -> Callable[..., tuple[Tensor, ...]]:
    def impl(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        grad, found, wanted, tensors = _checked_backward(args, kwargs, devices, tracing=False)
        x, names = found.call.hidden_states, WantedLora._fields
        if not found.call.topk_ids.shape[0]:
            return tuple(result.zero_() for result in like_arguments(x, names, tensors))
        with like_a_kernel(grad.device.type):
            gradients = lora_gradients(found.completed(), found.plan.backend, found.sizes, found.lora, grad, wanted)
            return tuple(handed_on(made, tensors.get(name), x) for name, made in zip(names, gradients, strict=True))

    return impl


def _fake_backward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    _, found, _, tensors = _checked_backward(args, kwargs, devices=True, tracing=True)
    return like_arguments(found.call.hidden_states, WantedLora._fields, tensors)


attach(BACKWARD, _make_backward(devices=False), _make_backward(devices=True), _fake_backward)
