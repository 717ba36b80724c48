"""Expert activations on float32 accumulators (the formulas of `torch_moe_ops.activations`)."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_moe_ops.kernels.triton.elements import nan_unless_finite

RSQRT_2 = tl.constexpr(0.7071067811865476)
GELU_TANH_SCALE = tl.constexpr(0.7978845608028654)  # sqrt(2 / pi)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _tanh(x):
    return 2.0 * _sigmoid(2.0 * x) - 1.0


@triton.jit
def _gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * RSQRT_2))


@triton.jit
def _gelu_tanh(x):
    return 0.5 * x * (1.0 + _tanh((x + 0.044715 * x * x * x) * GELU_TANH_SCALE))


@triton.jit
def _relu_squared(x):
    return x * tl.maximum(x, 0.0)  # NaN of NaN and -infinity


@triton.jit
def _at_most(x, limit):
    return tl.minimum(x, limit) + nan_unless_finite(x)


@triton.jit
def _within(x, limit):
    return tl.minimum(tl.maximum(x, -limit), limit) + nan_unless_finite(x)


@triton.jit
def _situ(gate, up, alpha, beta):
    h = alpha * _tanh(gate / alpha) * _sigmoid(gate) * (beta * _tanh(up / beta))
    return h + nan_unless_finite(gate) + nan_unless_finite(up)


@triton.jit
def activate_gated(gate, up, alpha, beta, limit, NAME: tl.constexpr, HAS_LIMIT: tl.constexpr):
    """act(gate, up); float32 tensors of one shape. HAS_LIMIT is False where limit is infinite."""
    if NAME == "silu" or NAME == "swigluoai":
        if HAS_LIMIT:
            gate = _at_most(gate, limit)
            up = _within(up, limit)
        h = gate * _sigmoid(alpha * gate) * (up + beta)
    elif NAME == "swiglustep":
        h = _at_most(gate * _sigmoid(gate), limit) * _within(up, limit)
    elif NAME == "situ":
        h = _situ(gate, up, alpha, beta)
    elif NAME == "gelu":
        h = _gelu(gate) * up
    elif NAME == "gelu_tanh":
        h = _gelu_tanh(gate) * up
    else:
        tl.static_assert(NAME == "relu2", "unknown gated activation")
        h = _relu_squared(gate) * up
    return h


@triton.jit
def activate_plain(x, NAME: tl.constexpr):
    """act(x) where the activation has no gate."""
    if NAME == "silu_no_mul":
        h = x * _sigmoid(x)
    elif NAME == "gelu_no_mul":
        h = _gelu(x)
    elif NAME == "relu2_no_mul":
        h = _relu_squared(x)
    else:
        tl.static_assert(NAME == "identity_no_mul", "unknown activation without gate")
        h = x
    return h
