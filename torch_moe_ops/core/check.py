"""The one place where an op's error text is made.

Every error has the form ``moeq::<op>: <argument> must <requirement>, got <value>``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch


def check(cond: Any, message: Callable[[], str]) -> None:
    """Raise RuntimeError(message()) unless cond holds.

    A plain bool costs 0.1 us. A symbolic bool (tracing) becomes a guard through torch._check,
    which alone would cost 0.9 us in eager mode.
    """
    if cond is True:
        return
    if cond is False:
        raise RuntimeError(message())
    torch._check(cond, message)


def check_given(op: str, argument: str, value: Any) -> None:
    """Raise where a tensor is None: dispatch lets that through although the schema says Tensor."""
    if value is None:
        fail(op, argument, "be a Tensor", None)


def fail(op: str, argument: str, requirement: str, got: Any) -> NoReturn:
    """Raise the library's error for one argument of one op."""
    raise RuntimeError(describe(op, argument, requirement, got))


def describe(op: str, argument: str, requirement: str, got: Any) -> str:
    """The text of an error: op, argument, what was required, what came."""
    return f"moeq::{op}: {argument} must {requirement}, got {show(got)}"


def show(value: Any) -> str:
    """Shapes as tuples, strings quoted, everything else by its repr."""
    if isinstance(value, torch.Size):
        return str(tuple(value))
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    return repr(value)
