"""What the field's kernels round, in plain torch: the distance of a peer that cannot be run, stated as emulated.

Sums are taken in float64, so that what tensor cores lose in a sum is left out: an emulated distance is a lower bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from moe_peers import common
from torch import Tensor

from torch_moe_ops.core.activations import apply_activation, is_gated

E4M3_LARGEST = 448.0


@dataclass(frozen=True)
class Numerics:
    """The roundings of a W4A16 or W8A8 layer in which both GEMMs write bfloat16.

    round_weights: codes times scales become bfloat16 before they are multiplied.
    act: "none"; "group" or "token": e4m3 codes under a float32 scale per 128 values, or per row.
    round_activation: the activation's result is bfloat16 before it is quantized.
    """

    name: str
    round_weights: bool = False
    act: str = "none"
    round_activation: bool = True


MARLIN = Numerics("marlin", round_weights=True)
# The kernel that the block peer runs behind the activation quantizes from float32, which is closer than vLLM's own.
BLOCKS = Numerics("vllm_triton", act="group", round_activation=False)
TOKENS = Numerics("vllm_triton", act="token")
# INT4 codes are e4m3 values and scales multiply sums: no weight is rounded.
MARLIN_FP8 = Numerics("marlin", act="token")
OF_FORMAT = {
    **dict.fromkeys(common.INT4, MARLIN),
    **{f"{fmt}-a8": MARLIN_FP8 for fmt in common.INT4_FORMS},
    "fp8": BLOCKS,
    "fp8row": TOKENS,
    "fp8half": TOKENS,
}


def operand(x: Tensor, act: str) -> Tensor:
    """float64 values [rows, K] of the GEMM operand that is made of x."""
    if act == "none":
        return x.bfloat16().double()
    grouped = x.float().unflatten(1, (-1, 128 if act == "group" else x.shape[1]))
    scale = grouped.abs().amax(2, keepdim=True).clamp_min(1e-4) / E4M3_LARGEST
    codes = (grouped / scale).clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn)
    return (codes.float().double() * scale.double()).flatten(1)


def weight(weights: common.Weights, which: int, expert: int, numerics: Numerics) -> Tensor:
    """float64 [N, K]."""
    values = weights.expert(which, expert)
    return (values.bfloat16() if numerics.round_weights else values).double()


def emulated(
    weights: common.Weights,
    inputs: common.Inputs,
    numerics: Numerics,
    activation: str = "silu",
    limit: float | None = None,
) -> Tensor:
    """bfloat16 [tokens, hidden_size]: every GEMM's result is rounded, the second one after the routing weight.

    limit: the activation's swiglu_limit; None: its own.
    """
    tokens, hidden = inputs.x.shape
    slots = torch.zeros(tokens, inputs.ids.shape[1], hidden, device=inputs.x.device)
    for e in torch.unique(inputs.ids).tolist():
        token, slot = torch.where(inputs.ids == e)
        x = operand(inputs.x[token], numerics.act)
        h = (x @ weight(weights, 1, e, numerics).T).float().bfloat16().float()
        gate, up = h.chunk(2, 1) if is_gated(activation) else (None, h)
        h = apply_activation(activation, gate, up, limit=limit)
        h = h.bfloat16().float() if numerics.round_activation else h
        y = (operand(h, numerics.act) @ weight(weights, 2, e, numerics).T).float()
        slots[token, slot] = (y * inputs.weights[token, slot, None]).bfloat16().float()
    return slots.sum(1).bfloat16()
