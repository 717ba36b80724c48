"""Prepared weights with experts that every token goes to: which columns of ids and logits belong to them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torch_moe_ops.prepared.prepared_weights import PreparedWeights
from torch_moe_ops.routing.reference import append_shared


def append_shared_experts(
    topk_ids: Tensor, topk_weights: Tensor, w: PreparedWeights, shared_expert_weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """For a router of one's own: what it chose for `w`, with a column behind it for each shared expert of `w`.

    Args:
        topk_ids, topk_weights: [num_tokens, top_k], integers and floats.
        shared_expert_weights: as in `route`.

    Returns: both with w.num_shared_experts more columns, in their own dtypes. Plain operations of torch.
    Raises: TypeError: w is not prepared weights; ValueError: shared_expert_weights of another shape, or without need.
    """
    if not isinstance(w, PreparedWeights):
        raise TypeError(f"append_shared_experts: w must be PreparedWeights, got {type(w).__name__}")
    given, rows = shared_expert_weights, topk_ids.shape[0]
    if not w.num_shared_experts:
        if given is not None:
            raise ValueError("append_shared_experts: shared_expert_weights must be None where w has no shared experts")
        return topk_ids, topk_weights
    if given is not None and tuple(given.shape) not in ((rows, 1), (rows, w.num_shared_experts)):
        shapes = f"[{rows}, 1] or [{rows}, {w.num_shared_experts}]"
        text = f"shared_expert_weights must have shape {shapes}, got {tuple(given.shape)}"
        raise ValueError(f"append_shared_experts: {text}")
    return append_shared(topk_ids, topk_weights, _routed_experts(w), w.num_shared_experts, shared_expert_weights)


def check_columns(router_logits: Any, w: PreparedWeights) -> None:
    """What `route` and the routed op cannot know of each other: that the logits are of the routed experts of `w`.

    Raises RuntimeError where they are not, ValueError where `w` is one rank's share.
    """
    check_router_columns(router_logits, _routed_experts(w), w.num_shared_experts)


def check_router_columns(router_logits: Any, routed: int, shared: int = 0, who: str = "fused_moe") -> None:
    """RuntimeError of `who` where logits have another number of columns than there are routed experts."""
    if isinstance(router_logits, Tensor) and router_logits.shape[-1] != routed:
        besides = f" (w has {shared} shared ones besides)" if shared else ""
        raise RuntimeError(
            f"{who}: router_logits must have {routed} columns, one for each routed expert{besides}, "
            f"got {tuple(router_logits.shape)}"
        )


def _routed_experts(w: PreparedWeights) -> int:
    if w.num_local_experts != w.num_experts:
        have = f"{w.num_local_experts} of {w.num_experts} experts"
        raise ValueError(f"w must have all experts where it has shared ones (see ExpertParallel), got {have}")
    return w.num_experts - w.num_shared_experts
