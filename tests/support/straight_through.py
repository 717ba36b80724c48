"""A routed layer that autograd differentiates: the oracle of gradients.

Dequantized weights, one expert at a time, every rounding of activations a straight-through step. It shares nothing with
`torch_moe_ops.gradients` but the quantizers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from problems import Case, make_raw
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.core.activations import apply_activation
from torch_moe_ops.core.schemes import SCHEMES
from torch_moe_ops.numerics import w4a8
from torch_moe_ops.oracle.operands import quantized_operand


@dataclass
class Leaves:
    """What gets a gradient."""

    x: Tensor
    weights: Tensor
    w13_bias: Tensor | None
    w2_bias: Tensor | None


def weights_of(raw: moe.RawWeights, policy: str) -> tuple[Tensor, Tensor]:
    """What the layer multiplies by, float32: a policy rounds NVFP4 and MXFP4 weights once more."""
    if policy == "exact":
        return moe.dequantize_experts(raw)
    w13, w2 = (w4a8.dequantize(codes, s) for codes, s in ((raw.w13, raw.w13_scale), (raw.w2, raw.w2_scale)))
    if raw.w13_scale_2 is None:
        return w13, w2
    of_rows = raw.w13_scale_2.repeat_interleave(w13.shape[1] // raw.w13_scale_2.shape[1], 1)
    return w13 * of_rows[:, :, None], w2 * raw.w2_scale_2[:, None, None]


def layer(
    leaves: Leaves,
    ids: Tensor,
    raw: moe.RawWeights,
    w13: Tensor,
    w2: Tensor,
    act_format: str,
    *,
    offset: int = 0,
    on_input: bool = False,
    rounds: torch.dtype | None = None,
    constants: tuple[float | None, ...] = (None, None, None),
    lora: moe.Lora | None = None,
    lora_ids: Tensor | None = None,
) -> Tensor:
    """[num_tokens, hidden_size] in the dtype of w13. rounds: the dtype of hidden states, which rounds what they meet.

    lora: adapters beside the experts, with each token's; they see what is not quantized.
    """
    dtype = w13.dtype
    x = leaves.x
    if on_input:
        x = _through(x * leaves.weights, lambda v: _cast(v, rounds))
    out = x * 0
    gated = raw.is_gated
    for e in range(w13.shape[0]):
        token, slot = torch.nonzero(ids.long() - offset == e, as_tuple=True)
        if not token.numel():
            continue
        rows = _rounded(x[token], act_format, raw, raw.a13_input_scale, e)
        z = rows @ w13[e].T + _of_adapters(lora, "13", e, x[token], lora_ids, token)
        if leaves.w13_bias is not None:
            z = z + leaves.w13_bias[e]
        gate, up = z.chunk(2, 1) if gated else (None, z)
        h = apply_activation(raw.activation, gate, up, *constants)
        plain = _through(h, lambda v: _cast(v, rounds))
        h = plain if act_format == "none" else _rounded(h, act_format, raw, raw.a2_input_scale, e)
        y = h @ w2[e].T + _of_adapters(lora, "2", e, plain, lora_ids, token)
        if leaves.w2_bias is not None:
            y = y + leaves.w2_bias[e]
        out = out.index_add(0, token, y if on_input else y * leaves.weights[token, slot, None])
    return out.to(dtype)


def layer_of(
    case: Case,
    w: moe.PreparedWeights,
    leaves: Leaves,
    ids: Tensor,
    constants: tuple[float | None, ...] = (None, None, None),
    **lora: Any,
) -> Tensor:
    """`layer` with the weights of a case, as they were prepared."""
    raw = make_raw(case)
    return layer(
        leaves,
        ids,
        raw,
        *weights_of(raw, case.weight_policy),
        case.act_format,
        offset=w.local_expert_offset,
        on_input=w.router_weight_on_input,
        rounds=case.dtype,
        constants=constants,
        **lora,
    )


def _of_adapters(
    lora: moe.Lora | None, name: str, e: int, rows: Tensor, ids: Tensor | None, token: Tensor
) -> Tensor | float:
    """What each token's adapter adds to its rows, adapter by adapter."""
    if lora is None or ids is None or getattr(lora, f"a{name}") is None:
        return 0.0
    a, b = getattr(lora, f"a{name}")[e], getattr(lora, f"b{name}")[e]
    scaling = torch.as_tensor(lora.scaling).reshape(-1)
    total: Tensor | float = 0.0
    for adapter, (a_own, b_own) in enumerate(zip(a.chunk(len(scaling), 0), b.chunk(len(scaling), 1), strict=True)):
        mine = (ids[token] == adapter).to(rows.dtype)[:, None]
        total = total + mine * scaling[adapter] * (rows @ a_own.T @ b_own.T)
    return total


def _cast(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    return value if dtype is None else value.to(dtype).to(value.dtype)


def _through(value: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
    """rounding(value), with the gradient of value."""
    return value + (rounding(value.detach()) - value.detach())


def _rounded(rows: Tensor, act_format: str, raw: moe.RawWeights, scale: Tensor | None, e: int) -> Tensor:
    if act_format == "none":
        return rows
    scheme = SCHEMES[raw.scheme]
    gscale = None
    if scale is not None and act_format in scheme.static_acts:
        gscale = (scale[e] if scale.ndim else scale).reciprocal()

    def quantized(v: Tensor) -> Tensor:
        operand = quantized_operand(act_format, v.float(), gscale, scheme.fp8_group, v.dtype)
        values = operand.values if operand.factor is None else operand.values * operand.factor
        return values / gscale if gscale is not None and act_format == "nvfp4" else values

    return _through(rows, quantized)
