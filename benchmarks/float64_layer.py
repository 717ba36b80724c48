"""A layer of gated SiLU experts in float64, which the CPU benchmarks compare results with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ExpertWeights = Callable[[int], tuple[Tensor, Tensor, Tensor]]  # an expert's gate, up and down, float64


def layer_in_float64(weights_of: ExpertWeights, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """[tokens, hidden] of x [tokens, hidden], by ids and routing weights [tokens, top_k]."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for expert in ids.unique().tolist():
        gate, up, down = weights_of(expert)
        tokens, slots = (ids == expert).nonzero(as_tuple=True)
        rows = x[tokens].double()
        h = torch.nn.functional.silu(rows @ gate.T) * (rows @ up.T)
        out.index_add_(0, tokens, (h @ down.T) * weights[tokens, slots].double()[:, None])
    return out


def relative(got: Tensor, want: Tensor) -> float:
    """Relative L2 distance."""
    return float((got.double() - want.double()).norm() / want.double().norm())
