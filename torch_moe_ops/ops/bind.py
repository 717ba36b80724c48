"""Attaching Python kernels to schemas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.core.check import fail
from torch_moe_ops.core.schemas import LIB, arguments
from torch_moe_ops.ops.autograd import Rule, attach_autograd

_NOTHING = nullcontext()


def like_a_kernel(device_type: str) -> AbstractContextManager[Any]:
    """Run a Python body as if it were C++: neither autograd nor autocast sees what happens inside.

    Without it a pure-torch backend would be differentiated through, and multiplied in bfloat16 under
    autocast, and a C++ one would not. Derivatives are rules of the ops (derivatives.py). Free where both are off.
    """
    if torch.is_autocast_enabled(device_type):
        return _without_autocast(device_type)
    return torch._C._AutoDispatchBelowAutograd() if torch.is_grad_enabled() else _NOTHING


@contextmanager
def _without_autocast(device_type: str) -> Iterator[None]:
    with torch.autocast(device_type, enabled=False), torch._C._AutoDispatchBelowAutograd():
        yield


def attach(
    name: str,
    cpu: Callable[..., Any],
    anywhere: Callable[..., Any],
    fake: Callable[..., Any],
    rule: Rule | None = None,
    parts: Callable[..., Any] | None = None,
) -> None:
    """Give op `name` its kernels.

    cpu: runs where every tensor argument is an ordinary one on the CPU (the dispatcher guarantees it).
    anywhere: runs on any device and checks devices itself.
    fake: shapes, dtypes and the same errors, no data.
    rule, parts: as in `attach_autograd`.
    """
    LIB.impl(name, cpu, "CPU")
    LIB.impl(name, anywhere, "CUDA")  # ordinary tensors, of which some are on a CUDA device
    strided = _strided_only(name, anywhere)
    for key in ("CompositeExplicitAutograd", "NestedTensorCPU", "NestedTensorCUDA"):
        LIB.impl(name, strided, key)
    torch.library.register_fake(f"moeq::{name}", _strided_only(name, fake), lib=LIB)
    attach_autograd(name, cpu, anywhere, rule, parts)


def _strided_only(name: str, body: Callable[..., Any]) -> Callable[..., Any]:
    """`body` for arguments that may be sparse, nested, or of another layout whose sizes or memory mean other things."""
    op, names = name.removesuffix(".out"), arguments(name)[0]

    def checked(*args: Any, **kwargs: Any) -> Any:
        for argument, value in (*zip(names, args, strict=False), *kwargs.items()):
            if isinstance(value, Tensor) and (value.layout is not torch.strided or value.is_nested):
                got = f"a nested tensor ({value.layout})" if value.is_nested else value.layout
                fail(op, argument, "be a strided tensor", got)
        return body(*args, **kwargs)

    return checked
