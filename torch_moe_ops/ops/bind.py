"""Attaching Python kernels to schemas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from torch_moe_ops._schemas import LIB

_NOTHING = nullcontext()


def like_a_kernel(device_type: str) -> AbstractContextManager[Any]:
    """Run a Python body as if it were C++: neither autograd nor autocast sees what happens inside.

    Without it a pure-torch backend would be differentiated through, and multiplied in bfloat16 under
    autocast, and a C++ one would not. The ops are inference-only on every backend. Free where both are off.
    """
    if torch.is_autocast_enabled(device_type):
        return _without_autocast(device_type)
    return torch._C._AutoDispatchBelowAutograd() if torch.is_grad_enabled() else _NOTHING


@contextmanager
def _without_autocast(device_type: str) -> Iterator[None]:
    with torch.autocast(device_type, enabled=False), torch._C._AutoDispatchBelowAutograd():
        yield


def attach(name: str, cpu: Callable[..., Any], anywhere: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Give op `name` its kernels.

    cpu: runs where every tensor argument is on the CPU (the dispatcher guarantees it).
    anywhere: runs on any device and checks devices itself.
    fake: shapes, dtypes and the same errors, no data.
    """
    LIB.impl(name, cpu, "CPU")
    LIB.impl(name, anywhere, "CompositeExplicitAutograd")
    torch.library.register_fake(f"moeq::{name}", fake, lib=LIB)
