"""What tests of gradients share: layers, bounds, leaves, and a prepared layer whose biases learn."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from problems import Case, make_raw
from tolerances import relative_l2
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.core.schemes import SCHEMES

F32, BF16, F16 = 1e-5, 6e-3, 2e-3
# Where the intermediate is quantized, a value next to a tie may move to the neighbouring code.
MOVED = 2e-2
FORMATS = [(s.name, act) for s in SCHEMES.values() for act in s.act_formats]
LARGE = Case(tokens=37, experts=6, top_k=3, hidden=128, inter=96)
# swiglu_alpha, swiglu_beta, swiglu_limit that an activation's gradient is tested with besides its own.
LIMITS: dict[str, tuple[float | None, ...]] = {
    "silu": (None, None, 0.4),
    "swigluoai": (1.3, 0.5, 0.4),
    "swiglustep": (None, None, 0.3),
    "situ": (0.5, 0.7, None),
}


def leaf(t: Tensor | None, dtype: torch.dtype | None = None) -> Any:
    """A copy that gets a gradient, in `dtype`."""
    return None if t is None else t.detach().to(dtype or t.dtype).clone().requires_grad_()


def bounds_of(case: Case) -> tuple[float, float]:
    """Relative distances that are allowed: in general, and of what an intermediate that moved to another code reaches."""
    bound = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16}[case.dtype]
    return bound, MOVED if case.act_format != "none" else bound


def backends_of(case: Case) -> list[str]:
    """Those that run a case on a CPU."""
    settings = {"act_format": case.act_format, "weight_policy": case.weight_policy, "device": "cpu"}
    against = moe.explain(make_raw(case), **settings).against
    return [name for name in ("reference", "cpu") if not against[name]]


def learning(
    case: Case, backend: str, constants: tuple[float | None, ...] = (None, None, None), **options: Any
) -> moe.PreparedWeights:
    """The layer of a case, its biases leaves. constants: alpha, beta, limit."""
    names = dict(zip(("swiglu_alpha", "swiglu_beta", "swiglu_limit"), constants, strict=True))
    settings = {"act_format": case.act_format, "weight_policy": case.weight_policy, "backend": backend}
    w = moe.prepare(make_raw(case), **settings, **names, **options)
    return dataclasses.replace(w, w13_bias=leaf(w.w13_bias), w2_bias=leaf(w.w2_bias))


def differentiated(out: Tensor) -> Tensor:
    """The gradient that `out` was differentiated with."""
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out.dtype)
    out.backward(grad)
    return grad


def check_biases(case: Case, w: moe.PreparedWeights, w13_grad: Tensor, w2_grad: Tensor, of_w13: float) -> None:
    """Gradients of the biases of `w`, which a layout may pad, against expected ones. of_w13: the bound of that one."""
    halves = 2 if make_raw(case).is_gated else 1
    found = w.w13_bias.grad.unflatten(1, (halves, -1))[:, :, : case.inter].flatten(1)
    assert relative_l2(found, w13_grad) <= of_w13
    assert relative_l2(w.w2_bias.grad, w2_grad) <= bounds_of(case)[0]
