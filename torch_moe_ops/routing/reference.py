"""Routing: router logits -> topk_ids, topk_weights.

One pipeline serves every method: scores -> choice scores (bias, groups) -> top-k -> weights
(renormalise, scale). What differs between methods is data, `METHODS`. Everything is computed in
float32, whatever the logits' dtype: scores in bf16 change the selection.

NaN and infinity: a NaN logit is the last choice of its row and has weight 0, and never disturbs the
others; a row of NaN gives ids 0..top_k-1 with weights 0. Softmax shares its mass equally among the
logits that equal the maximum, so that one +inf takes everything, two share it, and a row of -inf is
uniform. `topk`, whose weights are the logits, passes infinities on.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from torch_moe_ops.core.routing_methods import MAX_EXPERTS, METHODS

# Keeps a sum of sigmoids from being 0 (DeepSeek's reference, MiniMax, FlashInfer). A softmax's kept
# mass is at least 1 / num_experts, where adding it changes no bit.
EPSILON = 1e-20


def route_reference(
    router_logits: Tensor,
    routing_bias: Tensor | None,
    routing_method: str,
    top_k: int,
    n_group: int = 0,
    topk_group: int = 0,
    routed_scaling_factor: float = 1.0,
    renormalize: bool | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Choose top_k experts per token and weight them.

    Args: as `moeq::route`, already checked by check_route.
        router_logits: [num_tokens, num_experts] bfloat16, float16 or float32, any strides.
        routing_bias: [num_experts] float32 or None.
        dtype: arithmetic and weights; float32, or float64 for an oracle.

    Returns:
        topk_ids: [num_tokens, top_k] int32, distinct, by descending choice score, ties by ascending id.
        topk_weights: [num_tokens, top_k] of `dtype`, final (scaled), never NaN.
    """
    method = METHODS[routing_method]
    # Contiguous, because vectorised and strided loops may round differently.
    logits = router_logits.to(dtype).contiguous()
    scores = SCORES[method.score](logits)
    choice = scores if routing_bias is None else scores + routing_bias.to(dtype)
    excluded = _outside_best_groups(choice, n_group, topk_group, routing_bias is not None) if n_group > 1 else None
    topk_ids = _top_k(choice, top_k, excluded)

    weights = SCORES[method.weight](logits.gather(1, topk_ids)) if method.weight else scores.gather(1, topk_ids)
    weights = torch.where(weights.isnan(), 0.0, weights)
    if method.renormalizes if renormalize is None else renormalize:
        weights = _renormalize(weights)
    if routed_scaling_factor != 1.0:
        weights = weights * routed_scaling_factor
    return topk_ids.to(torch.int32), weights


def append_shared(
    topk_ids: Tensor, topk_weights: Tensor, num_experts: int, num_shared_experts: int, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A column for each expert that every token goes to, behind those that were chosen for it.

    Args:
        topk_ids, topk_weights: [num_tokens, top_k] int32 and float32, as route_reference gives them.
        num_experts: those that the router knows; the shared ones follow, with ids from num_experts on.
        weights: [num_tokens, num_shared_experts], any float dtype; None: 1.

    Returns: both with num_shared_experts more columns.
    """
    shape = (topk_ids.shape[0], num_shared_experts)
    ids = torch.arange(num_experts, num_experts + num_shared_experts, dtype=topk_ids.dtype, device=topk_ids.device)
    given = topk_weights.new_ones(()) if weights is None else weights.to(topk_weights.dtype)
    return torch.cat([topk_ids, ids.expand(shape)], 1), torch.cat([topk_weights, given.expand(shape)], 1)


def _softmax(logits: Tensor) -> Tensor:
    """Softmax over the last dimension that leaves NaN where it is and knows infinity (see the module's docstring)."""
    is_nan = logits.isnan()
    top = torch.where(is_nan, -math.inf, logits).amax(-1, keepdim=True)
    mass = torch.where(logits == top, 1.0, torch.exp(logits - top))  # inf - inf would be NaN
    total = torch.where(is_nan, 0.0, mass).sum(-1, keepdim=True)
    return mass / total  # 0 only where all are NaN


def _sqrtsoftplus(logits: Tensor) -> Tensor:
    # logaddexp(z, 0) = log(1 + e^z) without overflow and without softplus's switch to z at z > 20.
    return torch.logaddexp(logits, torch.zeros_like(logits)).sqrt()


SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda logits: logits,
    "softmax": _softmax,
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": _sqrtsoftplus,
}


def _renormalize(weights: Tensor) -> Tensor:
    """Weights (not negative) over their sum; infinite ones share everything, as in softmax."""
    top = weights.amax(-1, keepdim=True)
    weights = torch.where(top.isinf(), weights.isinf().to(weights.dtype), weights)
    return weights / (weights.sum(-1, keepdim=True) + EPSILON)


def _outside_best_groups(choice: Tensor, n_group: int, topk_group: int, has_bias: bool) -> Tensor:
    """[num_tokens, num_experts] bool: True for the experts outside the topk_group best groups."""
    num_tokens, num_experts = choice.shape
    grouped = torch.where(choice.isnan(), -math.inf, choice).view(num_tokens, n_group, num_experts // n_group)
    # Field convention: the two best where a bias was added (DeepSeek-V3), the best otherwise (V2).
    scores = grouped.topk(2, dim=-1).values.sum(-1) if has_bias else grouped.amax(-1)
    outside = torch.ones_like(scores, dtype=torch.bool)
    outside = outside.scatter(1, _top_k(scores, topk_group), False)
    return outside.repeat_interleave(num_experts // n_group, dim=1, output_size=num_experts)


def _top_k(scores: Tensor, k: int, excluded: Tensor | None = None) -> Tensor:
    """Indices [num_tokens, k] int64 of the k largest: descending, ties by ascending index.

    NaN comes after -inf, and `excluded` after NaN. torch.topk promises nothing about ties, hence it is
    given keys that are all different.
    """
    key = _ordered_bits(scores)
    if excluded is not None:
        key = torch.where(excluded, torch.iinfo(key.dtype).min, key)
    if key.dtype == torch.int64:  # float64 leaves no bits for the index
        return key.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    size = scores.shape[-1]
    tie_break = torch.arange(size - 1, -1, -1, device=scores.device)
    unique = key.to(torch.int64) * MAX_EXPERTS + tie_break
    return unique.topk(k, dim=-1).indices


def _ordered_bits(scores: Tensor) -> Tensor:
    """Integers in the order of the floats, -0.0 equal to 0.0, NaN below all (and above iinfo.min)."""
    integer = torch.int64 if scores.dtype == torch.float64 else torch.int32
    limits = torch.iinfo(integer)
    bits = (scores + 0.0).view(integer)  # -0.0 + 0.0 is 0.0
    # Negative floats order backwards: flip all bits but the sign.
    ordered = torch.where(bits < 0, bits ^ limits.max, bits)
    return torch.where(scores.isnan(), limits.min + 1, ordered)
