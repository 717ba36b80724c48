"""`moeq::moe_routed_lora_backward` refuses what `moe_routed_lora` refuses, in the same words, and what is its own."""

from __future__ import annotations

from typing import Any

import abuse
import pytest
import torch
from problems import Case
from samples import lora_call, overload

FORWARD, OP = "moe_routed_lora", "moe_routed_lora_backward"
CASE = Case(hidden=96, inter=64, bias=True)


def _given() -> dict[str, Any]:
    return lora_call(CASE, "reference")


def _backward() -> dict[str, Any]:
    return {"grad_output": torch.ones(CASE.tokens, CASE.hidden), **_given(), "wanted": [True] * 8}


def _error(op: str, given: dict[str, Any]) -> str:
    try:
        overload(op)(**given)
    except RuntimeError as error:
        return str(error)
    return ""


def test_it_refuses_what_the_forward_op_refuses() -> None:
    given, refused = _given(), 0
    assert not _error(OP, _backward())
    for name, value in given.items():
        if not isinstance(value, torch.Tensor):
            continue
        for what, change in abuse.wrong(value):
            new = change(value)
            text = _error(FORWARD, {**given, name: new})
            got = _error(OP, {**_backward(), name: new})
            refused += bool(text)
            if text:
                assert got == text.replace(f"moeq::{FORWARD}:", f"moeq::{OP}:"), f"{name} {what}"
    assert refused > 40


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("grad_output", torch.ones(5, 95), "grad_output must have shape (5, 96), got (5, 95)"),
        ("grad_output", torch.ones(5, 96).long(), "grad_output must have one of the dtypes"),
        ("grad_output", None, "grad_output must be a Tensor, got None"),
        ("wanted", [True], "wanted must have 8 values"),
        ("w13_bias", None, "w13_bias must be given where its gradient is wanted, got None"),
    ],
)
def test_its_own_arguments(name: str, value: Any, told: str) -> None:
    assert _error(OP, {**_backward(), name: value}).startswith(f"moeq::{OP}: {told}")


def test_adapters_of_nothing() -> None:
    factors = {f"lora_{name}": None for name in ("a13", "b13", "a2", "b2")}
    told = "lora_a13 must be given, or lora_a2, with their lora_b, got None"
    assert _error(FORWARD, {**_given(), **factors}) == f"moeq::{FORWARD}: {told}"
