"""Expert activations on float32 accumulators (the formulas of `torch_moe_ops.core.activations`)."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_moe_ops.backends.triton_engine.elements import nan_unless_finite

RSQRT_2 = tl.constexpr(0.7071067811865476)
TWICE_GELU_TANH_SCALE = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _tanh(x):
    """Exact relative to the result, however small; below 0.7 the odd polynomial of sm90/numerics/sigmoids.cuh."""
    size = tl.abs(x)
    square = size * size
    series = -0.0051386617 * square + 0.02009197
    series = series * square - 0.05355886
    series = series * square + 0.13329111
    series = series * square - 0.3333319
    near_zero = size * square * series + size
    beyond = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * size))
    h = tl.where(size < 0.7, near_zero, beyond)
    return tl.where(x < 0, -h, h)


@triton.jit
def _gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * RSQRT_2))


@triton.jit
def _gelu_tanh(x):
    # 0.5 (1 + tanh y) is sigmoid(2 y), which does not cancel.
    return x * _sigmoid((x + 0.044715 * x * x * x) * TWICE_GELU_TANH_SCALE)


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
