"""Activations against formulas written with Python's own math, in double precision."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from torch_moe_ops.core.activations import (
    ACTIVATIONS,
    apply_activation,
    check_activation,
    get_activation,
    is_gated,
    resolve_constants,
)

GATED = ("silu", "gelu", "gelu_tanh", "relu2", "swigluoai", "swiglustep", "situ")
NOT_GATED = ("silu_no_mul", "gelu_no_mul", "relu2_no_mul", "identity_no_mul")


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


def gelu(x: float) -> float:
    return 0.5 * x * math.erfc(-x / math.sqrt(2.0))


def clamp(x: float, limit: float) -> float:
    return max(-limit, min(x, limit))


def swigluoai(g: float, u: float, alpha: float, beta: float, limit: float) -> float:
    g = min(g, limit)
    return (clamp(u, limit) + beta) * g * sigmoid(alpha * g)


# (gate, up, alpha, beta, limit) -> value
FORMULAS: dict[str, Callable[[float, float, float, float, float], float]] = {
    "silu": lambda g, u, a, b, limit: min(g, limit) * sigmoid(min(g, limit)) * clamp(u, limit),
    "gelu": lambda g, u, *_: gelu(g) * u,
    "gelu_tanh": lambda g, u, *_: 0.5 * g * (1.0 + math.tanh(math.sqrt(2.0 / math.pi) * (g + 0.044715 * g**3))) * u,
    "relu2": lambda g, u, *_: max(g, 0.0) ** 2 * u,
    "swigluoai": swigluoai,
    "swiglustep": lambda g, u, a, b, limit: min(g * sigmoid(g), limit) * clamp(u, limit),
    "situ": lambda g, u, a, b, limit: b * math.tanh(u / b) * a * math.tanh(g / a) * sigmoid(g),
    "silu_no_mul": lambda g, x, *_: x * sigmoid(x),
    "gelu_no_mul": lambda g, x, *_: gelu(x),
    "relu2_no_mul": lambda g, x, *_: max(x, 0.0) ** 2,
    "identity_no_mul": lambda g, x, *_: x,
}
# The activations' own constants, as their models state them.
OWN = {"swigluoai": (1.702, 1.0, 7.0), "swiglustep": (1.0, 0.0, 7.0), "situ": (4.0, 25.0, math.inf)}
NEUTRAL = (1.0, 0.0, math.inf)
CONSTANTS = {
    "silu": (None, None, 2.5),
    "swigluoai": (0.9, 0.25, 3.0),
    "swiglustep": (None, None, 1.5),
    "situ": (2.0, 3.0, None),
}
NOT_TAKEN = "which does not take it"
CASES = [(name, (None, None, None)) for name in FORMULAS] + list(CONSTANTS.items())


def halves(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.tensor([-90.0, -20.0, -7.5, -3.0, -1.0, -1e-4, -0.0, 0.0, 0.3, 1.0, 2.6, 6.9, 7.1, 30.0, 120.0])
    grid = torch.cartesian_prod(values, values).to(dtype)
    return grid[:, 0].reshape(15, 15), grid[:, 1].reshape(15, 15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "constants"), CASES)
def test_formulas(name: str, constants: tuple[float | None, ...], dtype: torch.dtype) -> None:
    gate, up = halves(dtype)
    before = gate.clone(), up.clone()
    out = apply_activation(name, gate if name in GATED else None, up, *constants)
    assert out.dtype == dtype and out.shape == up.shape
    assert torch.equal(gate, before[0]) and torch.equal(up, before[1])
    own = OWN.get(name, NEUTRAL)
    a, b, limit = (o if c is None else c for c, o in zip(constants, own, strict=True))
    pairs = zip(gate.flatten().tolist(), up.flatten().tolist(), strict=True)
    want = torch.tensor([FORMULAS[name](g, u, a, b, limit) for g, u in pairs], dtype=torch.float64).view(15, 15)
    # gelu's lower tail cancels in 1 + erf(x): exact there only to the unit roundoff of x * u.
    rtol, atol = (3e-6, 1e-4) if dtype == torch.float32 else (1e-13, 1e-11)
    atol = atol if "gelu" in name else atol * 1e-6
    torch.testing.assert_close(out.double(), want, rtol=rtol, atol=atol)


def test_names() -> None:
    assert set(ACTIVATIONS) == set(GATED) | set(NOT_GATED)
    assert all(is_gated(name) for name in GATED) and not any(is_gated(name) for name in NOT_GATED)
    for ask in (is_gated, get_activation, resolve_constants):
        with pytest.raises(ValueError) as error:
            ask("swish")
        assert str(error.value) == f"activation must be one of {list(ACTIVATIONS)}, got 'swish'"


def test_resolve_constants() -> None:
    for name in ACTIVATIONS:
        own = resolve_constants(name)
        assert own == OWN.get(name, NEUTRAL) == check_activation("moe", name)
        assert resolve_constants(name, *own) == own
    assert resolve_constants("silu", limit=7.0) == (1.0, 0.0, 7.0)
    assert resolve_constants("swigluoai", 1.0, 0.0) == (1.0, 0.0, 7.0)
    assert resolve_constants("swigluoai", limit=math.inf) == (1.702, 1.0, math.inf)
    assert resolve_constants("situ", beta=30.0) == (4.0, 30.0, math.inf)


@pytest.mark.parametrize(
    ("name", "constants", "text"),
    [
        ("silu", (1.702, None, None), f"swiglu_alpha must be None for activation 'silu', {NOT_TAKEN}, got 1.702"),
        ("gelu", (None, 1.0, None), f"swiglu_beta must be None for activation 'gelu', {NOT_TAKEN}, got 1.0"),
        ("situ", (None, None, 7.0), f"swiglu_limit must be None for activation 'situ', {NOT_TAKEN}, got 7.0"),
        (
            "identity_no_mul",
            (None, None, 1.0),
            f"swiglu_limit must be None for activation 'identity_no_mul', {NOT_TAKEN}, got 1.0",
        ),
        ("swigluoai", (math.inf, None, None), "swiglu_alpha must be finite, got inf"),
        ("swigluoai", (None, math.nan, None), "swiglu_beta must be finite, got nan"),
        ("silu", (None, None, math.nan), "swiglu_limit must be a number, got nan"),
        ("silu", (None, None, 0.0), "swiglu_limit must be positive, got 0.0"),
        ("swiglustep", (None, None, -7.0), "swiglu_limit must be positive, got -7.0"),
        ("situ", (0.0, None, None), "swiglu_alpha must be positive, got 0.0"),
        ("situ", (None, -1.0, None), "swiglu_beta must be positive, got -1.0"),
    ],
)
def test_wrong_constants(name: str, constants: tuple[float | None, ...], text: str) -> None:
    with pytest.raises(ValueError) as error:
        resolve_constants(name, *constants)
    assert str(error.value) == text
    with pytest.raises(RuntimeError) as error_of_op:
        check_activation("nvfp4_moe", name, *constants)
    assert str(error_of_op.value) == f"moeq::nvfp4_moe: {text}"


def test_check_activation_lists_the_names() -> None:
    with pytest.raises(RuntimeError) as error:
        check_activation("moe", "swish")
    assert str(error.value) == f"moeq::moe: activation must be one of {list(ACTIVATIONS)}, got 'swish'"


def test_a_gate_exactly_where_the_activation_is_gated() -> None:
    x = torch.ones(2)
    with pytest.raises(ValueError, match="gate must be given for activation 'silu'"):
        apply_activation("silu", None, x)
    with pytest.raises(ValueError, match="gate must be None for activation 'relu2_no_mul'"):
        apply_activation("relu2_no_mul", x, x)


def test_nan_is_not_clamped_away() -> None:
    nan, one = torch.tensor([math.nan]), torch.ones(1)
    for name in GATED:
        limit = 7.0 if "limit" in ACTIVATIONS[name].takes else None
        assert apply_activation(name, nan, one, limit=limit).isnan()
        assert apply_activation(name, one, nan, limit=limit).isnan()
    assert all(apply_activation(name, None, nan).isnan() for name in NOT_GATED)
