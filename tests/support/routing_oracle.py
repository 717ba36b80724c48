"""Routing re-derived in numpy float64, one row and one formula at a time; and router logits to try it on."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torch_moe_ops.core.routing_methods import METHODS

Vector = NDArray[np.float64]

SOFTMAX_CHOICE = ("default", "renormalize_naive")
SIGMOID_CHOICE = ("sigmoid", "sigmoid_renorm", "minimax2", "deepseek_v3")
SUM_IS_ONE = ("renormalize", "renormalize_naive", "sigmoid_renorm", "minimax2", "deepseek_v3", "deepseek_v4")
WITH_BIAS = ("deepseek_v3", "minimax2", "deepseek_v4")
WITH_FACTOR = ("default", *WITH_BIAS)
SOFTMAX = ("default", "renormalize", "renormalize_naive")
TOP_K = (1, 2, 4, 6, 8, 10, 22, 32)


def top_ks(method: str, num_experts: int) -> list[int]:
    return [k for k in TOP_K if k <= num_experts and (method != "llama4" or k == 1)]


def draw(num_tokens: int, num_experts: int, seed: int, low: float = -6.0, high: float = 6.0) -> Tensor:
    """Logits whose rows are evenly spaced values in random order: no ties, also not in float32."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.linspace(low, high, num_experts)
    return torch.stack([values[torch.randperm(num_experts, generator=generator)] for _ in range(num_tokens)])


def draw_hostile(num_tokens: int, num_experts: int, generator: torch.Generator, fewer: int = 0) -> Tensor:
    """NaN, infinities, both zeros, the largest and the smallest, scores that are subnormal. `fewer` of the first kinds
    are left out, so that the others come into play."""
    pool = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 3e38, -3e38, 1e-45, 1.0, -90.0, -100.0])
    return pool[torch.randint(fewer, len(pool), (num_tokens, num_experts), generator=generator)]


def groups_of(method: str, groups: tuple[int, int]) -> tuple[int, int]:
    """(n_group, topk_group), none for a method that knows no groups."""
    return groups if METHODS[method].takes_groups else (0, 0)


def methods_and_groups(groups: tuple[int, int]) -> list[tuple[str, tuple[int, int]]]:
    """Every method without groups, and those that take them with these."""
    return [(name, g) for name in METHODS for g in {(0, 0): None, groups_of(name, groups): None}]


def draw_bias(num_experts: int, seed: int, shift: float = 0.0) -> Tensor:
    return torch.randn(num_experts, generator=torch.Generator().manual_seed(seed)) * 0.3 + shift


def softmax(z: Vector) -> Vector:
    mass = np.exp(z - z.max())
    return mass / mass.sum()


def sigmoid(z: Vector) -> Vector:
    return 1.0 / (1.0 + np.exp(-z))


def choice_scores(method: str, z: Vector, bias: Vector | None, n_group: int, topk_group: int) -> Vector:
    if method in SOFTMAX_CHOICE:
        choice = softmax(z)
    elif method in SIGMOID_CHOICE:
        choice = sigmoid(z)
    elif method == "deepseek_v4":
        choice = np.sqrt(np.log1p(np.exp(z)))
    else:
        choice = z.copy()
    if bias is not None:
        choice = choice + bias
    if n_group > 1:
        groups = np.split(choice, n_group)
        score = [np.sort(g)[-2:].sum() if bias is not None else g.max() for g in groups]
        best = sorted(range(n_group), key=lambda g: (-score[g], g))[:topk_group]
        choice = np.concatenate([g if i in best else np.full_like(g, -np.inf) for i, g in enumerate(groups)])
    return choice


def route_row(
    method: str,
    z: Vector,
    top_k: int,
    bias: Vector | None = None,
    n_group: int = 0,
    topk_group: int = 0,
    factor: float = 1.0,
    renormalize: bool | None = None,
) -> tuple[list[int], Vector, float]:
    """(ids, weights, smallest gap between neighbours among the best top_k + 1 choices)."""
    choice = choice_scores(method, z, bias, n_group, topk_group)
    order = np.lexsort((np.arange(len(z)), -choice))
    ids = order[:top_k]
    best = choice[order[: top_k + 1]]
    gap = float(np.min(best[:-1] - best[1:])) if len(best) > 1 else np.inf
    if method in ("default", "renormalize_naive"):
        weights = softmax(z)[ids]
    elif method == "renormalize":
        weights = softmax(z[ids])
    elif method == "topk":
        weights = z[ids]
    elif method == "deepseek_v4":
        weights = np.sqrt(np.log1p(np.exp(z[ids])))
    else:
        weights = sigmoid(z[ids])
    if method in SUM_IS_ONE if renormalize is None else renormalize:
        weights = weights / weights.sum()
    return ids.tolist(), weights * factor, gap
