"""How the ops stand with autograd: some have a derivative, the others refuse one by name, and it costs next to nothing.

Where an input requires a gradient, the outputs get a node. Its backward follows the op's Rule; where there is none, or
for an argument without a gradient (packed weights, scales), it raises, so that a gradient never silently lacks a part.
In a compiled graph that node is traced, so what refuses is an op of its own, `moeq_autograd::refuse`, which raises
when the compiled backward runs. Forward-mode derivatives raise at once.

In inference mode none of this is reached. Elsewhere the kernel here stands where torch's own fallback would, and calls
the op's body itself where nothing else is to come between them: dispatching a second time would cost 3 us.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import _C, Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from torch_moe_ops.core.check import fail
from torch_moe_ops.core.saving import for_backward
from torch_moe_ops.core.schemas import LIB

_HELPERS = torch.library.Library("moeq_autograd", "DEF")
_HELPERS.define("refuse(Tensor grad, SymInt[] size, ScalarType dtype, str op, str argument) -> Tensor")

_WITHOUT = "be detached from the graph, or the op called under torch.no_grad(): it has no derivative"
_CONSTANT = "be detached from the graph: the op has gradients, but none to it"
_NO_TANGENT = "be detached from the graph: the op has no forward-mode derivative"


def _refuse(grad: Tensor, size: list[int], dtype: torch.dtype, op: str, argument: str) -> Tensor:
    fail(op, argument or "inputs", _CONSTANT if argument else _WITHOUT, "a backward pass")


_HELPERS.impl("refuse", _refuse, "CompositeExplicitAutograd")
torch.library.register_fake(
    "moeq_autograd::refuse", lambda grad, size, dtype, op, argument: grad.new_empty(size, dtype=dtype), lib=_HELPERS
)

Args = tuple[Any, ...]


@dataclass(frozen=True)
class Rule:
    """The derivative of an op.

    backward: (arguments, results, gradients of the results, whether each argument needs one) -> {position: gradient}.
        Called in traces too. results: those of the forward pass that it keeps.
    differentiable: whether an argument, by its position, has a gradient in this call.
    constant: positions of arguments on which no result depends smoothly: their gradient is zero, as None.
    keeps: which results, by position. A caller must not change those in place before the backward pass.
    """

    backward: Callable[[Args, Args, tuple[Tensor, ...], tuple[bool, ...]], dict[int, Tensor]]
    differentiable: Callable[[int, Args], bool]
    constant: tuple[int, ...] = ()
    keeps: tuple[int, ...] = ()


class _Node(_SingleLevelFunction):
    """Runs an op; its backward follows the rule. writes: the op returns nothing and writes its last argument.

    Of one level, as a node of a C++ kernel is: transforms of torch.func come before the kernel that makes it.
    """

    @staticmethod
    def forward(
        ctx: Any, op: str, names: tuple[str, ...], run: Callable[..., Any], rule: Rule | None, writes: bool, *args: Any
    ) -> Any:
        ctx.op, ctx.names, ctx.rule = op, names, rule
        with _C._AutoDispatchBelowAutograd(), for_backward() if rule is not None else nullcontext():
            result = run(*args)
        if rule is None:
            ctx.inputs = _inputs(args)
        else:
            ctx.plain = [None if isinstance(a, Tensor) else (a,) for a in args]
            results = result if isinstance(result, tuple) else (result,)
            kept = [results[i] for i in rule.keeps]
            ctx.save_for_backward(*(a for a in args if isinstance(a, Tensor)), *kept)
        if not writes:
            return result
        ctx.mark_dirty(args[-1])
        return args[-1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        needs = ctx.needs_input_grad[_OWN_ARGUMENTS:]
        grad = next(g for g in grads if g is not None and g.is_floating_point())
        found: dict[int, Tensor] = {}
        constant: tuple[int, ...] = ()
        args: Args = ()
        if ctx.rule is not None:
            saved = iter(ctx.saved_tensors)
            args = tuple(next(saved) if plain is None else plain[0] for plain in ctx.plain)
            smooth = tuple(need and ctx.rule.differentiable(i, args) for i, need in enumerate(needs))
            if any(smooth):
                with _without_autocast(grad.device.type):
                    found = ctx.rule.backward(args, tuple(saved), grads, smooth)
            constant = ctx.rule.constant
        for i, needed in enumerate(needs):
            if needed and i not in found and i not in constant:
                named = ctx.rule is not None
                like = (_inputs(args) if named else ctx.inputs)[i]
                found[i] = torch.ops.moeq_autograd.refuse(grad, *like, ctx.op, ctx.names[i] if named else "")
        return (*(None,) * _OWN_ARGUMENTS, *map(found.get, range(len(needs))))


def _inputs(args: Args) -> list[Any]:
    """By input: what its gradient would look like."""
    return [(a.shape, a.dtype) if isinstance(a, Tensor) else None for a in args]


def _without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """For a rule's products, which a compiler traces under the forward pass's autocast, and which are in float32."""
    on = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)  # meta has none
    return torch.autocast(device_type, enabled=False) if on else nullcontext()


_OWN_ARGUMENTS = 5  # of _Node.forward, before those of the op


def attach_autograd(
    name: str,
    cpu: Callable[..., Any],
    anywhere: Callable[..., Any],
    rule: Rule | None = None,
    parts: Callable[..., Any] | None = None,
) -> None:
    """Give op `name` its autograd kernel.

    cpu, anywhere: as in `bind.attach`.
    rule: its derivative; None: it has none.
    parts: the same op as several that have derivatives, called where a gradient is wanted.
    """
    packet, _, suffix = name.partition(".")
    op = getattr(getattr(torch.ops.moeq, packet), suffix or "default")
    tensors = 1 + max(i for i, a in enumerate(op._schema.arguments) if "Tensor" in str(a.type) and not a.kwarg_only)
    names = tuple(a.name for a in op._schema.arguments)
    bodies: dict[int, Callable[..., Any]] = {}  # keys of a call -> what they lead to, where that is one of ours
    is_grad_enabled, requires_grad, body_of = _C.is_grad_enabled, _C._any_requires_grad, bodies.get  # a look-up less

    def kernel(keyset: Any, *args: Any) -> Any:
        body = body_of(keyset.raw_repr())
        if body is None or forward_ad._current_level >= 0 or (is_grad_enabled() and requires_grad(*args[:tensors])):
            return rare(keyset, args)
        return body(*args)

    def kernel_with_out(keyset: Any, *args: Any, out: Any) -> Any:
        body = body_of(keyset.raw_repr())
        if (
            body is None
            or forward_ad._current_level >= 0
            or (is_grad_enabled() and requires_grad(*args[:tensors], out))
        ):
            return rare(keyset, args, out)
        return body(*args, out=out)

    def rare(keyset: Any, args: tuple[Any, ...], out: Tensor | None = None) -> Any:
        body = bodies.get(keyset.raw_repr()) or _body_of(keyset, cpu, anywhere)
        if body is not None:
            bodies[keyset.raw_repr()] = body
        values = (*args, out) if suffix else args
        if forward_ad._current_level >= 0 and any(_is_dual(value) for value in values):
            fail(packet, "inputs", _NO_TANGENT, "a forward-mode derivative")
        below = keyset & _C._after_autograd_keyset

        def run(*values: Any) -> Any:
            if body is not None:  # which nothing else is to come before
                return body(*values[:-1], out=values[-1]) if suffix else body(*values)
            return op.redispatch(below, *values[:-1], out=values[-1]) if suffix else op.redispatch(below, *values)

        if not (is_grad_enabled() and requires_grad(*values)):
            with _C._AutoDispatchBelowAutograd():
                return run(*values)
        if parts is not None:
            return parts(*args)
        if suffix and body is not None:
            _forget_history(out)
        with enable_single_level_autograd_function():  # which torch.func else takes for a mistake
            result = _Node.apply(packet, names, run, rule, bool(suffix), *values)  # type: ignore[attr-defined]
        return None if suffix else result

    LIB.impl(name, kernel_with_out if suffix else kernel, "Autograd", with_keyset=True)


def _body_of(keyset: Any, cpu: Callable[..., Any], anywhere: Callable[..., Any]) -> Callable[..., Any] | None:
    """The body that the keys of a call lead to; None where a mode, a subclass or a transform comes first."""
    key = (keyset & _C._after_ADInplaceOrView_keyset).highestPriorityTypeId()
    return {_C.DispatchKey.CPU: cpu, _C.DispatchKey.CUDA: anywhere}.get(key)


def _forget_history(out: Any) -> None:
    """All of `out` is written anew. With its old node, a buffer of every step would keep the nodes of all steps."""
    if isinstance(out, Tensor) and out.grad_fn is not None and not out._is_view():
        out.detach_()


def _is_dual(value: Any) -> bool:
    return isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None
