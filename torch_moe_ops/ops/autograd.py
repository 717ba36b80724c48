"""The ops have no derivatives. Asking for one is an error that names the op, never a gradient without the experts.

A forward pass that nobody differentiates runs. Where an input requires a gradient, the outputs get a node whose
backward raises. In a compiled graph that node is traced, so its backward calls an op of its own,
`moeq_autograd::refuse`, which raises when the compiled backward runs. Forward-mode derivatives, and those of
torch.func, raise at once.

In inference mode none of this is reached. Elsewhere the kernel here stands where torch's own fallback would, and calls
the op's body itself where nothing else is to come between them: dispatching a second time would cost 3 us.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import _C, Tensor
from torch.autograd import forward_ad

from torch_moe_ops.core.check import fail
from torch_moe_ops.core.schemas import LIB

_HELPERS = torch.library.Library("moeq_autograd", "DEF")
_HELPERS.define("refuse(Tensor grad, SymInt[] size, ScalarType dtype, str op) -> Tensor")

_WITHOUT = "be detached from the graph, or the op called under torch.no_grad(): it has no derivative"


def _fail(op: str, what: str) -> NoReturn:
    fail(op, "inputs", _WITHOUT, what)


def _refuse(grad: Tensor, size: list[int], dtype: torch.dtype, op: str) -> Tensor:
    _fail(op, "a backward pass")


_HELPERS.impl("refuse", _refuse, "CompositeExplicitAutograd")
torch.library.register_fake(
    "moeq_autograd::refuse", lambda grad, size, dtype, op: grad.new_empty(size, dtype=dtype), lib=_HELPERS
)


class _Undifferentiable(torch.autograd.Function):
    """Runs an op; its backward raises. writes: the op returns nothing and writes its last argument."""

    @staticmethod
    def forward(ctx: Any, op: str, run: Callable[..., Any], writes: bool, *args: Any) -> Any:
        ctx.op = op
        # By input: what its gradient would look like.
        ctx.inputs = [(a.shape, a.dtype) if isinstance(a, Tensor) else None for a in args]
        with _C._AutoDispatchBelowAutograd():
            result = run(*args)
        if not writes:
            return result
        ctx.mark_dirty(args[-1])
        return args[-1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        grad = next(g for g in grads if g is not None)
        needed = zip(ctx.inputs, ctx.needs_input_grad[3:], strict=True)
        found = [torch.ops.moeq_autograd.refuse(grad, *like, ctx.op) if needs else None for like, needs in needed]
        return None, None, None, *found


def attach_autograd(name: str, cpu: Callable[..., Any], anywhere: Callable[..., Any]) -> None:
    """Give op `name` its autograd kernel. cpu, anywhere: as in `bind.attach`."""
    packet, _, suffix = name.partition(".")
    op = getattr(getattr(torch.ops.moeq, packet), suffix or "default")
    tensors = 1 + max(i for i, a in enumerate(op._schema.arguments) if "Tensor" in str(a.type) and not a.kwarg_only)
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
            _fail(packet, "a forward-mode derivative")
        below = keyset & _C._after_autograd_keyset

        def run(*values: Any) -> Any:
            return op.redispatch(below, *values[:-1], out=values[-1]) if suffix else op.redispatch(below, *values)

        if not (is_grad_enabled() and requires_grad(*values)):
            with _C._AutoDispatchBelowAutograd():
                return run(*values)
        if _C._are_functorch_transforms_active():
            _fail(packet, "a derivative of torch.func")
        if suffix and body is not None:
            _forget_history(out)
        result = _Undifferentiable.apply(packet, run, bool(suffix), *values)
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
