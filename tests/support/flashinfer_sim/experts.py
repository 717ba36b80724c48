"""The layer that every simulated kernel computes, in float64, once its operands are decoded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Roundings:
    """What kernels round besides the operands of their GEMMs. Each maps float64 to float64.

    first: what the first GEMM gives, before biases where they are added later, and before the activation.
    second: what the second gives, before the sum over experts. bias_follows: w2's bias is added after that.
    """

    first: Callable[[Tensor], Tensor] = lambda x: x
    second: Callable[[Tensor], Tensor] = lambda x: x
    bias_follows: bool = False


# Whether simulated kernels round like that. Where they do not, what is left is arguments, layouts, scales and units, and
# a comparison with the oracle is sharp.
ROUNDS = False


@dataclass
class Expert:
    """One expert as a kernel sees it.

    w1: float64 [rows, H], rows [up; gate] where gated. up_factor, gate_factor multiply the accumulators of the
    first GEMM, factor2 that of the second; biases are added to the accumulators before. A factor may be [rows].
    """

    w1: Tensor
    w2: Tensor
    up_factor: float = 1.0
    gate_factor: float = 1.0
    factor2: float = 1.0
    bias1: Tensor | None = None
    bias2: Tensor | None = None
    alpha: float = 1.0
    beta: float = 0.0
    limit: float = math.inf


def activate(name: str, expert: Expert, accumulator: Tensor) -> Tensor:
    """Activation by FlashInfer's name, times what the output is to be multiplied by.

    Limit and beta are in units of the accumulators.
    """
    if expert.bias1 is not None:
        accumulator = accumulator + expert.bias1
    if name in PLAIN:
        return PLAIN[name](expert.gate_factor * accumulator) * expert.up_factor
    up, gate = accumulator.chunk(2, dim=-1)
    limit = expert.limit
    if name == "Situ":
        gate, up = expert.gate_factor * gate, up * expert.up_factor
        joined = expert.alpha * torch.tanh(gate / expert.alpha) * torch.sigmoid(gate)
        return joined * expert.beta * torch.tanh(up / expert.beta)
    if name == "SwigluStep":
        gate = expert.gate_factor * gate
        silu = (gate * torch.sigmoid(gate)).clamp(max=limit * expert.gate_factor)
        return silu * up.clamp(-limit, limit) * expert.up_factor
    up, gate = up.clamp(-limit, limit), gate.clamp(max=limit)
    gate = expert.gate_factor * gate
    if name in ("Geglu", "GegluTanh"):
        kind = "tanh" if name == "GegluTanh" else "none"
        return torch.nn.functional.gelu(gate, approximate=kind) * up * expert.up_factor
    assert name == "Swiglu", name
    return gate * torch.sigmoid(expert.alpha * gate) * (up + expert.beta) * expert.up_factor


PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "Relu2": lambda x: x.clamp(min=0) ** 2,
    "Identity": lambda x: x,
    "Silu": lambda x: x * torch.sigmoid(x),
    "Gelu": torch.nn.functional.gelu,
}


def layer(
    x: Callable[[int], Tensor],
    experts: list[Expert],
    ids: Tensor,
    weights: Tensor,
    offset: int,
    activation: str,
    requantize: Callable[[int, Tensor], Tensor],
    roundings: Roundings,
) -> Tensor:
    """sum over slots of weight * expert(x): float64 [tokens, H].

    x: expert -> the input [tokens, H] as that expert sees it. requantize: (expert, intermediate) -> operand.
    """
    if not ROUNDS:
        roundings = Roundings()
    out = torch.zeros(ids.shape[0], experts[0].w2.shape[0], dtype=torch.float64)
    for e, expert in enumerate(experts):
        token, slot = torch.nonzero(ids == e + offset, as_tuple=True)
        if not token.numel():
            continue
        hidden = activate(activation, expert, roundings.first(x(e)[token] @ expert.w1.T))
        y = requantize(e, hidden) @ expert.w2.T
        bias = 0.0 if expert.bias2 is None else expert.bias2
        if roundings.bias_follows:
            y = roundings.second(y * expert.factor2) + bias * expert.factor2
        else:
            y = roundings.second((y + bias) * expert.factor2)
        out.index_add_(0, token, y * weights[token, slot, None].double())
    return out
