"""The checks of the routed ops for those who may not import the ops: what calls prepared weights is below them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from torch_moe_ops.core.call import ExpertsCall

Checks = Callable[[str, tuple[Any, ...], Tensor], tuple[ExpertsCall, ExpertsCall]]
_checks: list[Checks] = []


def checked_by(checks: Checks) -> None:
    """Called once, by the ops."""
    _checks[:] = [checks]


def checked_call(op: str, args: tuple[Any, ...], out: Tensor) -> tuple[ExpertsCall, ExpertsCall]:
    """A call of a routed op, and the same as its backend gets it. Raises what the op raises.

    Args:
        op: such as "nvfp4_moe_routed"; args: all of its arguments, by position.
        out: its result.
    """
    (checks,) = _checks
    return checks(op, args, out)
