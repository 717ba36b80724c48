"""The gradient of router logits from that of the routing weights, at the experts that were chosen.

The choice itself has no derivative, so a routing bias, which only chooses, has none either. A NaN logit has weight 0
and gets no gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torch_moe_ops.core.routing_methods import METHODS
from torch_moe_ops.routing.reference import EPSILON, SCORES


def logits_gradient(
    grad_weights: Tensor,
    router_logits: Tensor,
    topk_ids: Tensor,
    routing_method: str,
    routed_scaling_factor: float,
    renormalize: bool | None,
) -> Tensor:
    """Gradient of router_logits, in their dtype; arithmetic in float32 (float64 for float64 logits).

    Args:
        grad_weights: [num_tokens, top_k] gradient of topk_weights.
        router_logits: [num_tokens, num_experts]; topk_ids: [num_tokens, top_k], what was chosen.
        routing_method, routed_scaling_factor, renormalize: as in `moeq::route`.
    """
    method, ids = METHODS[routing_method], topk_ids.long()
    logits = router_logits.double() if router_logits.dtype == torch.float64 else router_logits.float()
    kept = logits.gather(1, ids)
    # Scores over the chosen experts alone, or over all of them.
    of_chosen = bool(method.weight) or method.score != "softmax"
    score = method.weight or method.score
    inputs = kept if of_chosen else logits
    scores = SCORES[score](inputs)
    is_nan = scores.isnan()
    scores = torch.where(is_nan, 0.0, scores)
    weights = scores if of_chosen else scores.gather(1, ids)
    grad = grad_weights.to(logits.dtype) * routed_scaling_factor
    if method.renormalizes if renormalize is None else renormalize:
        grad = _of_renormalized(grad, weights)
    if not of_chosen:
        grad = torch.zeros_like(logits).scatter_add(1, ids, grad)
    grad = torch.where(is_nan, 0.0, DERIVATIVES[score](inputs, scores, grad))
    if of_chosen:
        grad = torch.zeros_like(logits).scatter_add(1, ids, grad)
    return grad.to(router_logits.dtype)


def product_gradients(
    grad_logits: Tensor,
    hidden_states: Tensor,
    router_weight: Tensor,
    router_bias: Tensor | None,
    needs: tuple[bool, ...],
) -> dict[int, Tensor]:
    """Gradients of the operands of router logits, each in its own dtype, by its position; sums in float32.

    Args:
        grad_logits: [num_tokens, num_experts] float32.
        needs: whether hidden_states, router_weight and router_bias need one.
    """
    found = {}
    if needs[0]:
        found[0] = (grad_logits @ router_weight.float()).to(hidden_states.dtype)
    if needs[1]:
        found[1] = (grad_logits.T @ hidden_states.float()).to(router_weight.dtype)
    if needs[2] and router_bias is not None:
        found[2] = grad_logits.sum(0).to(router_bias.dtype)
    return found


def _of_renormalized(grad: Tensor, weights: Tensor) -> Tensor:
    """Of weights / (their sum + epsilon)."""
    total = weights.sum(-1, keepdim=True) + EPSILON
    return (grad - (grad * weights).sum(-1, keepdim=True) / total) / total


def _of_sqrtsoftplus(logits: Tensor, scores: Tensor, grad: Tensor) -> Tensor:
    return torch.where(scores == 0, 0.0, grad * torch.sigmoid(logits) / (2 * scores))


# (logits, scores, gradient of the scores) -> gradient of the logits; keys as in SCORES.
DERIVATIVES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "identity": lambda logits, scores, grad: grad,
    "softmax": lambda logits, scores, grad: scores * (grad - (scores * grad).sum(-1, keepdim=True)),
    "sigmoid": lambda logits, scores, grad: grad * scores * (1 - scores),
    "sqrtsoftplus": _of_sqrtsoftplus,
}
