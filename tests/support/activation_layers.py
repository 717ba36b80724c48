"""Layers that compute an activation: arguments come as biases, so that neither is touched by the other."""

from __future__ import annotations

import torch
from special_rows import gate_up_pairs
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.core.activations import ACTIVATIONS

# (activation, limit): every activation, and those with a limit that they need not have.
WITH_LIMITS = (*((name, None) for name in ACTIVATIONS), ("silu", 7.0))


def layer(
    activation: str, limit: float | None, scheme: str, dtype: torch.dtype, size: int, device: str = "cpu"
) -> moe.RawWeights:
    """Expert i adds pair i of `gate_up_pairs` to zeros; w2 is the identity, size x size."""
    arguments = gate_up_pairs(activation)
    experts, halves = arguments.shape
    w13 = torch.zeros(experts, halves * size, size, dtype=dtype, device=device)
    w2 = torch.eye(size, dtype=dtype, device=device).repeat(experts, 1, 1)
    raw = moe.RawWeights("none", w13, w2) if scheme == "none" else moe.quantize_experts(w13, w2, scheme)
    bias = arguments[:, :, None].expand(-1, -1, size).flatten(1).contiguous().to(device)
    return moe.RawWeights(**(vars(raw) | {"w13_bias": bias, "activation": activation, "swiglu_limit": limit}))


def outputs(raw: moe.RawWeights, backend: str, dtype: torch.dtype) -> Tensor:
    """float32 [pairs]: the activation of each pair."""
    w = moe.prepare(raw, backend=backend, act_format="none")
    experts, device = raw.num_experts, raw.w13.device
    x = torch.ones(experts, raw.hidden_size, dtype=dtype, device=device)
    ids = torch.arange(experts, dtype=torch.int32, device=device)[:, None]
    weights = torch.ones(experts, 1, device=device)
    out = moe.fused_moe_routed(x, ids, weights, w, out_dtype=torch.float32)
    # 0 * infinity: what one column has that is not finite, all have.
    assert torch.equal(out.isfinite().all(1), out.isfinite().any(1))
    assert torch.equal(out[out.isfinite().all(1)], out[out.isfinite().all(1)][:, :1].expand(-1, raw.hidden_size))
    return out[:, 0].float()
