"""How configuration objects report a wrong value: object, field, what was required, what came."""

from __future__ import annotations

from typing import Any

from torch_moe_ops.core.check import show


def require(condition: bool, owner: str, field: str, requirement: str, got: Any) -> None:
    """Raise ValueError("<owner>: <field> must <requirement>, got <got>") unless condition holds."""
    if not condition:
        raise ValueError(f"{owner}: {field} must {requirement}, got {show(got)}")


def require_type(condition: bool, owner: str, field: str, requirement: str, got: Any) -> None:
    """Raise TypeError in the same form, with the type of what came."""
    if not condition:
        raise TypeError(f"{owner}: {field} must {requirement}, got {type(got).__name__}")


def require_int(owner: str, field: str, value: Any, minimum: int, maximum: int | None = None) -> None:
    """Raise unless value is an int (a bool is not one) in [minimum, maximum]."""
    require_type(isinstance(value, int) and not isinstance(value, bool), owner, field, "be an int", value)
    limits = f"be at least {minimum}" if maximum is None else f"lie in [{minimum}, {maximum}]"
    require(value >= minimum and (maximum is None or value <= maximum), owner, field, limits, value)


def require_bool(owner: str, field: str, value: Any) -> None:
    """Raise TypeError unless value is a bool."""
    require_type(isinstance(value, bool), owner, field, "be a bool", value)
