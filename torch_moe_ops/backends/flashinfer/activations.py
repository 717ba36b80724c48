"""Our activations as FlashInfer names them, and their constants as its kernels take them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torch_moe_ops.backends.flashinfer import package
from torch_moe_ops.core.call import ExpertsCall

# Both halves of swigluoai lie as silu's do: element order is the weights' business.
NAMES = {
    "silu": "Swiglu",
    "swigluoai": "Swiglu",
    "gelu": "Geglu",
    "gelu_tanh": "GegluTanh",
    "swiglustep": "SwigluStep",
    "situ": "Situ",
    "silu_no_mul": "Silu",
    "gelu_no_mul": "Gelu",
    "relu2_no_mul": "Relu2",
    "identity_no_mul": "Identity",
}


def activation_name(activation: str) -> str:
    """FlashInfer's name of one of our activations."""
    return NAMES[activation]


def activation_number(activation: str) -> int:
    """Its number in the installed release."""
    return package.number("ActivationType", activation_name(activation))


class Units(NamedTuple):
    """Real values of 1 in the accumulators of the gate and of the up half: float32 [local experts]."""

    gate: Tensor
    up: Tensor


def constant_tensors(call: ExpertsCall, units: Units | None = None) -> dict[str, Tensor | None]:
    """gemm1_alpha, gemm1_beta, gemm1_clamp_limit: float32 [local experts], None where a constant is the usual one.

    units: the TRTLLM kernels clamp the accumulators, and add beta to that of the up half, before they multiply
    them, so both are given in these units; alpha meets the multiplied gate and stays as it is. None: all are 1.
    """
    experts, device = call.w13.shape[0], call.w13.device

    def full(value: float) -> Tensor:
        return torch.full((experts,), value, dtype=torch.float32, device=device)

    found: dict[str, Tensor | None] = {"gemm1_alpha": None, "gemm1_beta": None, "gemm1_clamp_limit": None}
    if call.activation != "swiglustep":
        if call.swiglu_alpha != 1.0:
            found["gemm1_alpha"] = full(call.swiglu_alpha)
        if call.swiglu_beta != 0.0:
            found["gemm1_beta"] = full(call.swiglu_beta) if units is None else call.swiglu_beta / units.up
    if call.swiglu_limit != math.inf:
        found["gemm1_clamp_limit"] = full(call.swiglu_limit) if units is None else call.swiglu_limit / units.gate
    return found
