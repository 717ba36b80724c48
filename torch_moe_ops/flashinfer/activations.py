"""Our activations as FlashInfer names them, and their constants as its kernels take them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_moe_ops.flashinfer import package
from torch_moe_ops.ops.call import ExpertsCall

# Both halves of swigluoai lie as silu's do: element order is the weights' business.
NAMES = {
    "silu": "Swiglu",
    "swigluoai": "Swiglu",
    "gelu": "Geglu",
    "swiglustep": "SwigluStep",
    "relu2_no_mul": "Relu2",
    "identity_no_mul": "Identity",
}


def activation_number(activation: str) -> int:
    """FlashInfer's number of an activation, in the installed release."""
    return package.number("ActivationType", NAMES[activation])


def constant_tensors(call: ExpertsCall, unit: Tensor | None = None) -> dict[str, Tensor | None]:
    """gemm1_alpha, gemm1_beta, gemm1_clamp_limit: float32 [local experts], None where a constant is the usual one.

    unit: float32 [local experts], the real value of 1 in the accumulator. The kernels clamp the accumulator
    before it is multiplied, so the limit is given in its units; None: they are the same.
    """
    usual = {"gemm1_alpha": (call.swiglu_alpha, 1.0), "gemm1_beta": (call.swiglu_beta, 0.0)}
    if call.activation == "swiglustep":
        usual = {}
    experts, device = call.w13.shape[0], call.w13.device
    found: dict[str, Tensor | None] = {"gemm1_alpha": None, "gemm1_beta": None, "gemm1_clamp_limit": None}
    for name, (value, ordinary) in usual.items():
        if value != ordinary:
            found[name] = torch.full((experts,), value, dtype=torch.float32, device=device)
    if call.swiglu_limit != math.inf:
        limit = torch.full((experts,), call.swiglu_limit, dtype=torch.float32, device=device)
        found["gemm1_clamp_limit"] = limit if unit is None else limit / unit
    return found
