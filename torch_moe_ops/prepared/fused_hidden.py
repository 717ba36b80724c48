"""A layer from its hidden states and its router's weights: unpack prepared weights, call the op."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_moe_ops.core.schemas import arguments
from torch_moe_ops.prepared.prepared_weights import PreparedWeights

_NAMES = arguments("moe_hidden")[0]
_WEIGHTS = _NAMES[_NAMES.index("w13") : _NAMES.index("backend")]
# routing_method, top_k, n_group, topk_group, routed_scaling_factor, renormalize
RouteOptions = tuple[str, int, int, int, float, bool | None]


def fused_moe_hidden(
    hidden_states: Tensor,
    router_weight: Tensor,
    router_bias: Tensor | None,
    routing_bias: Tensor | None,
    options: RouteOptions,
    logits_dtype: torch.dtype,
    w: PreparedWeights,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`torch.ops.moeq.moe_hidden` on prepared weights without shared experts and a router weight on their input.

    Args:
        hidden_states: [num_tokens, hidden_size], unquantized.
        router_weight, router_bias, routing_bias, logits_dtype: as in `moeq::route_hidden`.

    Returns: output, topk_ids, topk_weights, router_logits.
    """
    method, top_k, *rest = options
    return torch.ops.moeq.moe_hidden(  # type: ignore[no-any-return]
        hidden_states,
        router_weight,
        router_bias,
        routing_bias,
        *(getattr(w, name) for name in _WEIGHTS),
        w.backend,
        w.scheme,
        w.act_format,
        method,
        top_k,
        w.activation,
        *w.constants(),
        w.num_experts,
        w.local_expert_offset,
        *rest,
        logits_dtype,
        w.weight_policy,
    )
