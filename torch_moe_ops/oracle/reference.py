"""The oracle: what a routed MoE means, in plain torch, one expert at a time.

    out[t] = sum_j topk_weights[t, j] * y[t, j],     e = topk_ids[t, j]
    y[t, j] = alpha2[e] * W2[e] @ A2(act(alpha1[e] * W13[e] @ A1(x[t]) + b13[e])) + b2[e]

A1 and A2 make the GEMM operand from an activation row, as `act_format` says. With `emulate` every
rounding step of the contract happens (docs/numerics.md); without it none does, which is the value
that the stored weights stand for. Arithmetic in float32 or, to bound its own error, in float64; sums of
products always in float64, rounded once. No setting of the process changes a result, and none is touched.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_moe_ops.core.activations import ACTIVATIONS, apply_activation
from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.oracle.operands import Operand, activation_operand, weight_operand

_CHUNK_ELEMENTS = 1 << 26  # of the [tokens, top_k, hidden_size] buffer


def experts_reference(call: ExpertsCall, emulate: bool = True, dtype: torch.dtype = torch.float32) -> Tensor:
    """[num_tokens, hidden_size] in `dtype`, not yet rounded to the output dtype.

    Args:
        call: a checked call in the linear layout.
        emulate: make every rounding step of the contract, or none of them.
        dtype: float32 or float64, of everything between the rounding steps; products are summed in float64.
    """
    tokens, top_k = call.topk_ids.shape
    hidden_size = call.w2.shape[1]
    out = call.hidden_states.new_empty((tokens, hidden_size), dtype=dtype)
    step = max(1, _CHUNK_ELEMENTS // (top_k * hidden_size))
    for start in range(0, tokens, step):
        rows = slice(start, min(start + step, tokens))
        scale = call.hidden_states_scale
        part = call._replace(
            hidden_states=call.hidden_states[rows],
            hidden_states_scale=None if scale is None else scale[rows],
            topk_ids=call.topk_ids[rows],
            topk_weights=call.topk_weights[rows],
        )
        out[rows] = _chunk(part, emulate, dtype)
    return out


def _chunk(call: ExpertsCall, emulate: bool, dtype: torch.dtype) -> Tensor:
    tokens, top_k = call.topk_ids.shape
    x = _weigh_input(call, emulate, dtype) if call.router_weight_on_input else call.hidden_states
    local = call.topk_ids.long() - call.local_expert_offset
    y = x.new_zeros((tokens, top_k, call.w2.shape[1]), dtype=dtype)
    for e in range(call.w13.shape[0]):
        token, slot = torch.nonzero(local == e, as_tuple=True)
        if token.numel():
            scale = call.hidden_states_scale
            y[token, slot] = _expert(call, e, x[token], None if scale is None else scale[token], emulate, dtype)
    return _combine(call, y, local, dtype)


def _weigh_input(call: ExpertsCall, emulate: bool, dtype: torch.dtype) -> Tensor:
    """x * w in float32, rounded once to the activation dtype."""
    x = call.hidden_states
    weighted = x.to(dtype) * call.topk_weights.to(dtype)
    return weighted.float().to(x.dtype) if emulate else weighted


def _expert(call: ExpertsCall, e: int, x: Tensor, x_scale: Tensor | None, emulate: bool, dtype: torch.dtype) -> Tensor:
    """One expert on the rows that visit it: [rows, hidden_size] before the routing weight."""
    halves = 2 if ACTIVATIONS[call.activation].is_gated else 1
    pieces = _gemm(call, 1, e, halves, activation_operand(call, 1, e, x, x_scale, emulate, dtype), dtype)
    if call.w13_bias is not None:
        bias = call.w13_bias[e].to(dtype).chunk(halves)
        pieces = [piece + b for piece, b in zip(pieces, bias, strict=True)]
    gate = pieces[0] if halves == 2 else None
    constants = (call.swiglu_alpha, call.swiglu_beta, call.swiglu_limit)
    h = apply_activation(call.activation, gate, pieces[-1], *constants)
    if emulate and call.act_format == "none":
        h = h.float().to(call.hidden_states.dtype).to(dtype)  # rounded once
    y = _gemm(call, 2, e, 1, activation_operand(call, 2, e, h, None, emulate, dtype), dtype)[0]
    return y if call.w2_bias is None else y + call.w2_bias[e].to(dtype)


def _gemm(call: ExpertsCall, gemm: int, e: int, halves: int, a: Operand, dtype: torch.dtype) -> list[Tensor]:
    """a @ W.T in real values, one piece per half of W's rows.

    fl(acc * fl(alpha * row factor)): what multiplies a whole row of an operand is applied to the accumulator.
    """
    w = weight_operand(call, gemm, e, halves, dtype)
    # float64 holds a product of float32 values exactly, and no reduced precision (TF32, bfloat16) stands in for it.
    acc = (a.values.double() @ w.values.double().T).to(dtype)
    alphas = call.g1_alphas if gemm == 1 else call.g2_alphas
    pieces = []
    for half, piece in enumerate(acc.chunk(halves, dim=1)):
        factor = None if alphas is None else _alpha(alphas, e, half)
        for row_factor in (None if w.factor is None else w.factor.chunk(halves)[half].T, a.factor):
            if row_factor is not None:
                factor = row_factor if factor is None else factor * row_factor
        pieces.append(piece if factor is None else piece * factor.to(dtype))
    return pieces


def _alpha(alphas: Tensor, e: int, half: int) -> Tensor:
    """[E], or [E, halves]."""
    return alphas[e] if alphas.ndim == 1 else alphas[e, half]


def _combine(call: ExpertsCall, y: Tensor, local: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum over slots in ascending order; slots of foreign experts contribute an exact zero."""
    mine = (local >= 0) & (local < call.w13.shape[0])
    weights = torch.ones_like(call.topk_weights) if call.router_weight_on_input else call.topk_weights
    out = y.new_zeros((y.shape[0], y.shape[2]))
    for j in range(y.shape[1]):
        term = weights[:, j, None].to(dtype) * y[:, j]
        out = out + torch.where(mine[:, j, None], term, 0.0)
    return out
