"""Derivatives of the activations (the formulas of `torch_moe_ops.gradients.activations`), in float32."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_moe_ops.backends.triton_engine.activations import (
    RSQRT_2,
    TWICE_GELU_TANH_SCALE,
    _gelu,
    _gelu_tanh,
    _relu_squared,
    _sigmoid,
    _tanh,
)

_RSQRT_2PI = tl.constexpr(0.3989422804014327)


@triton.jit
def _of_silu(x):
    s = _sigmoid(x)
    return s + x * s * (1.0 - s)


@triton.jit
def _of_gelu(x):
    return 0.5 * (1.0 + tl.erf(x * RSQRT_2)) + x * tl.exp(-0.5 * x * x) * _RSQRT_2PI


@triton.jit
def _of_gelu_tanh(x):
    # 0.5 (1 + tanh y) is sigmoid(2 y), and 0.5 (1 - tanh^2 y) 2 sigmoid(2 y) (1 - sigmoid(2 y)).
    s = _sigmoid((x + 0.044715 * x * x * x) * TWICE_GELU_TANH_SCALE)
    return s + x * s * (1.0 - s) * TWICE_GELU_TANH_SCALE * (1.0 + 0.134145 * x * x)


@triton.jit
def _of_relu_squared(x):
    return 2.0 * tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _of_situ(gate, up, alpha, beta):
    t = _tanh(gate / alpha)
    s = _sigmoid(gate)
    u = _tanh(up / beta)
    return beta * u * ((1.0 - t * t) * s + alpha * t * s * (1.0 - s)), alpha * t * s * (1.0 - u * u)


@triton.jit
def gradients_gated(gate, up, alpha, beta, limit, NAME: tl.constexpr, HAS_LIMIT: tl.constexpr):
    """(d act / d gate, d act / d up). HAS_LIMIT is False where limit is infinite."""
    if NAME == "silu" or NAME == "swigluoai":
        g = gate
        u = up
        if HAS_LIMIT:
            g = tl.minimum(gate, limit)
            u = tl.minimum(tl.maximum(up, -limit), limit)
        s = _sigmoid(alpha * g)
        of_gate = (u + beta) * (s + alpha * g * s * (1.0 - s))
        of_up = g * s
        if HAS_LIMIT:
            of_gate *= (gate <= limit).to(tl.float32)
            of_up *= (tl.abs(up) <= limit).to(tl.float32)
    elif NAME == "swiglustep":
        y = gate * _sigmoid(gate)
        of_gate = tl.minimum(tl.maximum(up, -limit), limit) * _of_silu(gate) * (y <= limit).to(tl.float32)
        of_up = tl.minimum(y, limit) * (tl.abs(up) <= limit).to(tl.float32)
    elif NAME == "situ":
        of_gate, of_up = _of_situ(gate, up, alpha, beta)
    elif NAME == "gelu":
        of_gate = _of_gelu(gate) * up
        of_up = _gelu(gate)
    elif NAME == "gelu_tanh":
        of_gate = _of_gelu_tanh(gate) * up
        of_up = _gelu_tanh(gate)
    else:
        tl.static_assert(NAME == "relu2", "unknown gated activation")
        of_gate = _of_relu_squared(gate) * up
        of_up = _relu_squared(gate)
    return of_gate, of_up


@triton.jit
def gradient_plain(x, NAME: tl.constexpr):
    """d act / d x where the activation has no gate."""
    if NAME == "silu_no_mul":
        d = _of_silu(x)
    elif NAME == "gelu_no_mul":
        d = _of_gelu(x)
    elif NAME == "relu2_no_mul":
        d = _of_relu_squared(x)
    else:
        tl.static_assert(NAME == "identity_no_mul", "unknown activation without gate")
        d = tl.full(x.shape, 1.0, tl.float32)
    return d
