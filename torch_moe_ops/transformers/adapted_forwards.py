"""Forwards of MoE blocks without the experts interface, on packed experts: what their own ones compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def llama4(block: Any, holder: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Shared and routed experts, and the router's logits.

    Its own forward runs every expert on every token, which its routing weight has multiplied before.
    """
    rows = hidden_states.reshape(-1, block.hidden_dim)
    logits = nn.Linear.forward(block.router, rows)
    top, ids = torch.topk(logits, block.top_k, dim=1)
    # Rounded to the model's dtype as there: the weights multiply tokens of that dtype.
    weights = torch.sigmoid(top.float()).to(top.dtype)
    return block.shared_expert(rows) + holder.run(rows, ids, weights), logits


def dbrx(experts: Any, holder: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """[batch, sequence, hidden_size] of [batch, sequence, hidden_size], routed by the block around."""
    rows = hidden_states.reshape(-1, experts.hidden_size)
    out = holder.run(rows, top_k_index, top_k_weights)
    return out.view(hidden_states.shape[0], -1, experts.hidden_size)


def jetmoe(block: Any, holder: Any, layer_input: Tensor) -> Tensor:
    """Routed experts and a bias for all of them.

    Its router sorts tokens by expert, through lengths on the host: only its logits are needed here.
    """
    rows = layer_input.reshape(-1, layer_input.shape[-1])
    router = block.router
    # Called where somebody listens: transformers records its logits by a hook.
    logits = router(rows)[-1] if router._forward_hooks else router.layer(rows).float()
    top, ids = logits.topk(router.top_k, dim=1)
    weights = torch.softmax(top, dim=1).type_as(rows)
    return holder.run(rows, ids, weights).view_as(layer_input) + block.bias
