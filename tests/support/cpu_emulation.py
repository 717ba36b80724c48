"""The canonical MoE contract, step by step in torch, to hold the C++ kernels against.

Written from the formulas alone: it shares no code with the package. Weights come decoded (codes times block
scales, exact); GEMMs run in float64, every rounding that the contract names happens in float32 or by a dtype
conversion of torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def decode_e2m1(codes: Tensor) -> Tensor:
    """[..., K/2] bytes, low nibble first -> [..., K]."""
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()
    values = E2M1[nibbles & 7]
    return torch.where(nibbles >= 8, -values, values)


def round_e2m1(y: Tensor) -> Tensor:
    """To the nearest value, the even code on a tie, saturating."""
    return round_table(y, E2M1.tolist())


def nvfp4_rows(x: Tensor, gscale: Tensor | None) -> tuple[Tensor, Tensor]:
    """-> values (code * block scale) and the factor each row is owed. gscale: 0-dim, or None for dynamic."""
    x = x.float()
    factor = torch.ones(x.shape[0])
    if gscale is None:
        amax = x.abs().amax(-1)
        gs = torch.where(amax == 0, torch.ones(()), torch.tensor(2688.0) / amax)[:, None]
        factor = 1.0 / gs[:, 0]
    else:
        gs = gscale.float().expand(x.shape[0])[:, None]
    blocks = x.unflatten(-1, (-1, 16))
    sixth = torch.tensor(1.0) / torch.tensor(6.0)
    s = (gs * (blocks.abs().amax(-1) * sixth)).clamp(max=448.0).to(torch.float8_e4m3fn).float()
    r = torch.where(s == 0, torch.zeros(()), 1.0 / (s * (1.0 / gs)))
    return (round_e2m1(blocks * r[..., None]) * s[..., None]).flatten(-2), factor


def activate(name: str, gate: Tensor, up: Tensor, alpha: float, beta: float, limit: float) -> Tensor:
    if name == "silu":
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return functional.silu(gate) * up
    if name == "gelu":
        return functional.gelu(gate) * up
    if name == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh") * up
    if name == "relu2":
        return functional.relu(gate).square() * up
    if name == "swigluoai":
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + beta) * gate * torch.sigmoid(alpha * gate)
    if name == "swiglustep":
        return functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)
    if name == "situ":
        return beta * torch.tanh(up / beta) * alpha * torch.tanh(gate / alpha) * torch.sigmoid(gate)
    single: dict[str, Callable[[Tensor], Tensor]] = {
        "silu_no_mul": functional.silu,
        "gelu_no_mul": functional.gelu,
        "relu2_no_mul": lambda x: functional.relu(x).square(),
        "identity_no_mul": lambda x: x,
    }
    return single[name](up)


@dataclass
class Layer:
    """One problem: w13 [E, halves * I, H] and w2 [E, H, I] hold code * block scale, exactly."""

    w13: Tensor
    w2: Tensor
    act_format: str = "none"
    activation: str = "silu"
    constants: tuple[float, float, float] = (1.0, 0.0, math.inf)
    g1_alphas: Tensor | None = None
    g2_alphas: Tensor | None = None
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None
    a1_gscale: Tensor | None = None
    a2_gscale: Tensor | None = None
    offset: int = 0
    weight_on_input: bool = False
    act_group: int = 0


def round_table(y: Tensor, values: list[float]) -> Tensor:
    """To the nearest of ascending magnitudes, the even index on a tie, saturating."""
    table = torch.tensor(values, dtype=torch.float64)
    distance = (y.abs().double()[..., None] - table).abs()
    best = distance.min(-1, keepdim=True).values
    hits = distance == best
    even = hits & (torch.arange(len(values)) % 2 == 0)
    index = torch.where(even.any(-1), even.int().argmax(-1), hits.int().argmax(-1))
    return torch.copysign(table[index].float(), y.float())


def magnitudes(mantissa_bits: int, exponents: int, bias: int) -> list[float]:
    """All magnitudes of a small float without infinity and NaN, ascending."""
    steps = 1 << mantissa_bits
    small = [m / steps * 2.0 ** (1 - bias) for m in range(steps)]
    return small + [(1 + m / steps) * 2.0 ** (e - bias) for e in range(1, exponents) for m in range(steps)]


MX_ELEMENTS = {
    "mxfp4": (6.0, E2M1.tolist()),
    "mxfp6_e3m2": (28.0, magnitudes(2, 8, 3)),
    "mxfp6_e2m3": (7.5, magnitudes(3, 4, 1)),
}


def mx_rows(x: Tensor, act_format: str) -> Tensor:
    """Blocks of 32 with a power of two each, RCEIL."""
    blocks = x.float().unflatten(-1, (-1, 32))
    largest, table = MX_ELEMENTS.get(act_format, (448.0, []))
    mantissa, exponent = torch.frexp(blocks.abs().amax(-1) / largest)
    ceiling = (exponent - (mantissa == 0.5).int()).clamp(-127, 127)
    factor = torch.exp2(ceiling.double())[..., None]
    y = (blocks.double() / factor).float()
    rounded = round_table(y, table) if table else y.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    return (rounded.double() * factor).flatten(-2)


def uniform_rows(x: Tensor, act_format: str, gscale: Tensor | None, group: int) -> tuple[Tensor, Tensor]:
    """fp8 or int8: -> values with their group's scale applied where there are groups, and the factor of each row."""
    largest = 448.0 if act_format == "fp8" else 127.0

    def element(y: Tensor) -> Tensor:
        if act_format == "fp8":
            return y.clamp(-448, 448).to(torch.float8_e4m3fn).double()
        return y.round().clamp(-127, 127).double()

    if gscale is not None:
        return element(x.float() * gscale), torch.ones(x.shape[0])
    if group:
        pieces = [uniform_rows(piece, act_format, None, 0) for piece in x.split(group, -1)]
        return torch.cat([v * f.double()[:, None] for v, f in pieces], -1), torch.ones(x.shape[0])
    amax = x.float().abs().amax(-1)
    s = torch.where(amax == 0, torch.ones(()), amax / largest)
    return element(x.float() / s[:, None]), s


def operand(x: Tensor, layer: Layer, dtype: torch.dtype, gscale: Tensor | None, e: int) -> tuple[Tensor, Tensor]:
    one = gscale[e] if gscale is not None and gscale.ndim else gscale
    if layer.act_format == "none":
        return x.float().to(dtype).double(), torch.ones(x.shape[0])
    if layer.act_format == "nvfp4":
        values, factor = nvfp4_rows(x, one)
        return values.double(), factor
    if layer.act_format.startswith("mx"):
        return mx_rows(x, layer.act_format), torch.ones(x.shape[0])
    return uniform_rows(x, layer.act_format, one, layer.act_group)


def scaled(acc: Tensor, alphas: Tensor | None, e: int, half: int, factor: Tensor) -> Tensor:
    """fl(acc * fl(alpha * factor))."""
    alpha = torch.ones(())
    if alphas is not None:
        alpha = alphas[e] if alphas.ndim == 1 else alphas[e, half]
    return acc.float() * (alpha * factor)[:, None]


def one_expert(layer: Layer, e: int, x: Tensor, dtype: torch.dtype) -> Tensor:
    values, factor = operand(x, layer, dtype, layer.a1_gscale, e)
    gated = not layer.activation.endswith("_no_mul")
    halves = (values @ layer.w13[e].double().T).chunk(2 if gated else 1, 1)
    pieces = [scaled(half, layer.g1_alphas, e, i, factor) for i, half in enumerate(halves)]
    if layer.w13_bias is not None:
        pieces = [p + b for p, b in zip(pieces, layer.w13_bias[e].chunk(len(pieces)), strict=True)]
    h = activate(layer.activation, pieces[0], pieces[-1], *layer.constants)
    values, factor = operand(h, layer, dtype, layer.a2_gscale, e)
    y = scaled(values @ layer.w2[e].double().T, layer.g2_alphas, e, 0, factor)
    return y if layer.w2_bias is None else y + layer.w2_bias[e]


def moe(layer: Layer, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """[T, H] float32, before the rounding to the output dtype."""
    dtype = x.dtype
    if layer.weight_on_input:
        x, weights = (x.float() * weights).to(dtype), torch.ones_like(weights)
    out = torch.zeros(x.shape[0], layer.w2.shape[1])
    for j in range(ids.shape[1]):
        for e in range(layer.w13.shape[0]):
            rows = (ids[:, j] - layer.offset == e).nonzero()[:, 0]
            if len(rows):
                out[rows] += weights[rows, j, None] * one_expert(layer, e, x[rows], dtype)
    return out
