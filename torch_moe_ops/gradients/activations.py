"""Derivatives of the activations: what multiplies the gradient of the result, for gate and up.

A clamp passes nothing outside its range and everything on it, bounds included, in every release of torch. (Its own does
so until 2.13; from 2.14 on it passes nothing on a bound.) Where a formula shows NaN or infinity that a bound would hide
(core/activations.py), the term that shows it is zero elsewhere and so has no derivative.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# (d result / d gate, d result / d up) at gate, up, alpha, beta, limit.
Derivative = Callable[[Tensor, Tensor, float, float, float], tuple[Tensor, Tensor]]


def activation_gradients(
    name: str, gate: Tensor | None, up: Tensor, grad: Tensor, alpha: float, beta: float, limit: float
) -> tuple[Tensor | None, Tensor]:
    """Gradients of gate and up from that of `apply_activation(name, gate, up, alpha, beta, limit)`.

    Args:
        gate, up, grad: one shape, float32 or float64; gate is None exactly where the activation is not gated.
        alpha, beta, limit: numbers, resolved.

    Returns: (None or like gate, like up).
    """
    if gate is None:
        return None, grad * UNGATED[name](up)
    of_gate, of_up = GATED[name](gate, up, alpha, beta, limit)
    return grad * of_gate, grad * of_up


def _below(x: Tensor, limit: float) -> Tensor:
    return (x <= limit).to(x.dtype)


def _within(x: Tensor, limit: float) -> Tensor:
    return (x.abs() <= limit).to(x.dtype)


def _swiglu(gate: Tensor, up: Tensor, alpha: float, beta: float, limit: float) -> tuple[Tensor, Tensor]:
    g, u = gate.clamp(max=limit), up.clamp(-limit, limit) + beta
    s = torch.sigmoid(alpha * g)
    of_gate, of_up = u * (s + alpha * g * s * (1 - s)), g * s
    return (of_gate, of_up) if limit == math.inf else (of_gate * _below(gate, limit), of_up * _within(up, limit))


def _swiglustep(gate: Tensor, up: Tensor, alpha: float, beta: float, limit: float) -> tuple[Tensor, Tensor]:
    y = F.silu(gate)
    return up.clamp(-limit, limit) * _of_silu(gate) * _below(y, limit), y.clamp(max=limit) * _within(up, limit)


def _situ(gate: Tensor, up: Tensor, alpha: float, beta: float, limit: float) -> tuple[Tensor, Tensor]:
    t, s, u = torch.tanh(gate / alpha), torch.sigmoid(gate), torch.tanh(up / beta)
    return beta * u * ((1 - t * t) * s + alpha * t * s * (1 - s)), alpha * t * s * (1 - u * u)


def _of_silu(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s + x * s * (1 - s)


def _of_gelu(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x * 0.5**0.5)) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _of_gelu_tanh(x: Tensor) -> Tensor:
    a, b = math.sqrt(2 / math.pi), 0.044715
    t = torch.tanh(a * (x + b * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * a * (1 + 3 * b * x * x)


def _of_relu2(x: Tensor) -> Tensor:
    return 2 * F.relu(x)


def _times_up(function: Callable[[Tensor], Tensor], derivative: Callable[[Tensor], Tensor]) -> Derivative:
    """Of function(gate) * up."""
    return lambda gate, up, *_: (derivative(gate) * up, function(gate))


GATED: dict[str, Derivative] = {
    "silu": _swiglu,
    "swigluoai": _swiglu,
    "swiglustep": _swiglustep,
    "situ": _situ,
    "gelu": _times_up(F.gelu, _of_gelu),
    "gelu_tanh": _times_up(lambda x: F.gelu(x, approximate="tanh"), _of_gelu_tanh),
    "relu2": _times_up(lambda x: F.relu(x).square(), _of_relu2),
}
UNGATED: dict[str, Callable[[Tensor], Tensor]] = {
    "silu_no_mul": _of_silu,
    "gelu_no_mul": _of_gelu,
    "relu2_no_mul": _of_relu2,
    "identity_no_mul": torch.ones_like,
}
