"""Expert activations: names, constants and formulas.

An activation joins the two halves of the first GEMM, gate g and up u, or acts on its only half x
where it is not gated. How a checkpoint orders or interleaves the rows of those halves is not the
formula's business: loading normalises it.

NaN and infinities are not bounded away: an argument that is not finite gives a result that is not, in clamps and in
functions that saturate too. Which of NaN and the infinities it is, is left open.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_moe_ops.core.check import describe, fail

_Formula = Callable[[Tensor, Tensor, float, float, float], Tensor]


@dataclass(frozen=True)
class Activation:
    """One activation: what it computes and which of its three constants a caller may set.

    `alpha`, `beta`, `limit` are the activation's own values; those not named in `takes` are fixed.
    A limit of infinity means no clamp.
    """

    name: str
    formula: _Formula  # (gate, up, alpha, beta, limit); gate is up where the activation is not gated
    takes: tuple[str, ...] = ()
    alpha: float = 1.0
    beta: float = 0.0
    limit: float = math.inf
    positive: tuple[str, ...] = ("limit",)

    @property
    def is_gated(self) -> bool:
        """Whether the first GEMM makes a gate as well as an up half."""
        return not self.name.endswith("_no_mul")

    @property
    def constants(self) -> tuple[float, float, float]:
        """The activation's own (alpha, beta, limit)."""
        return self.alpha, self.beta, self.limit


def _nan_unless_finite(x: Tensor) -> Tensor:
    """0, or NaN where x is NaN or infinite: added to a bounded function of x, it shows what the bound hides."""
    return x * 0


def _at_most(x: Tensor, limit: float) -> Tensor:
    return x.clamp(max=limit) + _nan_unless_finite(x)


def _within(x: Tensor, limit: float) -> Tensor:
    return x.clamp(-limit, limit) + _nan_unless_finite(x)


def _clamp_halves(gate: Tensor, up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    # The gate has no lower clamp: its sigmoid already takes care of large negative values.
    return (gate, up) if limit == math.inf else (_at_most(gate, limit), _within(up, limit))


def _swiglu(gate: Tensor, up: Tensor, alpha: float, beta: float, limit: float) -> Tensor:
    gate, up = _clamp_halves(gate, up, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def _swiglustep(gate: Tensor, up: Tensor, alpha: float, beta: float, limit: float) -> Tensor:
    # Unlike _swiglu, the clamp comes after silu.
    return _at_most(F.silu(gate), limit) * _within(up, limit)


def _situ(gate: Tensor, up: Tensor, alpha: float, beta: float, limit: float) -> Tensor:
    bounded = alpha * torch.tanh(gate / alpha) * torch.sigmoid(gate) * (beta * torch.tanh(up / beta))
    return bounded + _nan_unless_finite(gate) + _nan_unless_finite(up)


def _relu2(x: Tensor) -> Tensor:
    return x * F.relu(x)  # -infinity * 0 is NaN


# In the order of their numbers in compiled kernels (scripts/kernel_headers.py): those with a gate come first.
ACTIVATIONS: dict[str, Activation] = {
    a.name: a
    for a in (
        # silu's limit is DeepSeek-V4's clamp of both halves.
        Activation("silu", _swiglu, takes=("limit",)),
        # gpt-oss: 1.702, 1, 7.
        Activation("swigluoai", _swiglu, takes=("alpha", "beta", "limit"), alpha=1.702, beta=1.0, limit=7.0),
        Activation("swiglustep", _swiglustep, takes=("limit",), limit=7.0),
        # Kimi-K3: 4 bounds the gate, 25 the up half (the defaults of FlashInfer's CUTLASS kernels).
        Activation("situ", _situ, takes=("alpha", "beta"), alpha=4.0, beta=25.0, positive=("alpha", "beta", "limit")),
        Activation("gelu", lambda g, u, *_: F.gelu(g) * u),
        Activation("gelu_tanh", lambda g, u, *_: F.gelu(g, approximate="tanh") * u),
        Activation("relu2", lambda g, u, *_: _relu2(g) * u),
        Activation("silu_no_mul", lambda _g, x, *_: F.silu(x)),
        Activation("gelu_no_mul", lambda _g, x, *_: F.gelu(x)),
        Activation("relu2_no_mul", lambda _g, x, *_: _relu2(x)),
        Activation("identity_no_mul", lambda _g, x, *_: x),
    )
}


def get_activation(name: str) -> Activation:
    """The descriptor of an activation; ValueError lists the known names."""
    activation = ACTIVATIONS.get(name)
    if activation is None:
        raise ValueError(f"activation must be one of {list(ACTIVATIONS)}, got {name!r}")
    return activation


def is_gated(name: str) -> bool:
    """Whether w13 holds gate and up rows (True) or only up rows. ValueError for an unknown name."""
    return get_activation(name).is_gated


def resolve_constants(
    activation: str, alpha: float | None = None, beta: float | None = None, limit: float | None = None
) -> tuple[float, float, float]:
    """(alpha, beta, limit) of a call: None means the activation's own value.

    Resolving resolved values changes nothing, so fixed constants may be repeated but not changed.
    Raises ValueError for an unknown activation, a constant that the activation does not take, a NaN,
    an infinite alpha or beta, a limit that is not positive, and for situ an alpha or beta that is not.
    """
    found = get_activation(activation)
    problem = _constant_problem(found, alpha, beta, limit)
    if problem is not None:
        argument, requirement, got = problem
        raise ValueError(f"{argument} must {requirement}, got {got!r}")
    return _resolve(found, alpha, beta, limit)


def check_activation(
    op: str,
    activation: str,
    alpha: float | None = None,
    beta: float | None = None,
    limit: float | None = None,
) -> tuple[float, float, float]:
    """resolve_constants for an op's arguments: the same rules as RuntimeError in the op's form."""
    found = ACTIVATIONS.get(activation)
    if found is None:
        fail(op, "activation", f"be one of {list(ACTIVATIONS)}", activation)
    problem = _constant_problem(found, alpha, beta, limit)
    if problem is not None:
        raise RuntimeError(describe(op, *problem))
    return _resolve(found, alpha, beta, limit)


def apply_activation(
    name: str,
    gate: Tensor | None,
    up: Tensor,
    alpha: float | None = None,
    beta: float | None = None,
    limit: float | None = None,
) -> Tensor:
    """The activation of the first GEMM's output, in the dtype given and without rounding in between.

    Args:
        name: a key of ACTIVATIONS.
        gate: any shape, float32 or float64; None exactly where the activation is not gated.
        up: shape and dtype of gate; where not gated, the only half.
        alpha, beta, limit: None for the activation's own (see resolve_constants).

    Returns a tensor of up's shape and dtype. The inputs are never written; identity_no_mul returns `up`.
    """
    activation = get_activation(name)
    constants = resolve_constants(name, alpha, beta, limit)
    if (gate is not None) != activation.is_gated:
        requirement = "be given" if activation.is_gated else "be None"
        raise ValueError(f"gate must {requirement} for activation {name!r}")
    return activation.formula(up if gate is None else gate, up, *constants)


def _resolve(
    activation: Activation, alpha: float | None, beta: float | None, limit: float | None
) -> tuple[float, float, float]:
    return (
        activation.alpha if alpha is None else alpha,
        activation.beta if beta is None else beta,
        activation.limit if limit is None else limit,
    )


def _constant_problem(
    activation: Activation, alpha: float | None, beta: float | None, limit: float | None
) -> tuple[str, str, float] | None:
    """(argument, requirement, got) of the first constant that is wrong, None where all are right."""
    if alpha is None and beta is None and limit is None:
        return None
    for name, value, own in zip(("alpha", "beta", "limit"), (alpha, beta, limit), activation.constants, strict=True):
        if value is None or value == own:
            continue
        if name not in activation.takes:
            return f"swiglu_{name}", f"be None for activation {activation.name!r}, which does not take it", value
        if math.isnan(value) or (name != "limit" and math.isinf(value)):
            return f"swiglu_{name}", "be a number" if name == "limit" else "be finite", value
        single = ctypes.c_float(value).value  # as the kernels have it
        if math.isinf(single) != math.isinf(value):
            return f"swiglu_{name}", "be at most 3.4e38 in magnitude, the range of float32", value
        if name in activation.positive and single <= 0:
            return f"swiglu_{name}", "be positive" if value <= 0 else "be at least 1.4e-45, as float32 has it", value
    return None
