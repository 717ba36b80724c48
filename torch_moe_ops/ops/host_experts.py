"""The op `host_experts`: a layer whose experts lie partly on a GPU and partly on the host (schema: core/schemas.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_moe_ops.core.check import check, check_given, describe, fail
from torch_moe_ops.core.host_layers import HostLayer, layer_named
from torch_moe_ops.core.routing_methods import MAX_TOP_K
from torch_moe_ops.core.schemes import FLOATS
from torch_moe_ops.ops.bind import attach, like_a_kernel

_OP = "host_experts"


def _checked(
    hidden_states: Tensor, places: Tensor, topk_weights: Tensor, layer: str, out_dtype: torch.dtype | None
) -> tuple[HostLayer, torch.dtype]:
    """The layer, and the dtype of the result."""
    for name, t in (("hidden_states", hidden_states), ("places", places), ("topk_weights", topk_weights)):
        check_given(_OP, name, t)
    found = layer_named(_OP, layer)
    if hidden_states.ndim != 2 or hidden_states.shape[1] != found.hidden_size:
        fail(_OP, "hidden_states", f"have shape [num_tokens, {found.hidden_size}]", hidden_states.shape)
    if places.ndim != 2 or not 1 <= places.shape[1] <= MAX_TOP_K:
        fail(_OP, "places", f"have shape [num_tokens, top_k] with top_k in 1 ... {MAX_TOP_K}", places.shape)
    rows = f"have {hidden_states.shape[0]} rows like hidden_states"
    check(places.shape[0] == hidden_states.shape[0], lambda: describe(_OP, "places", rows, places.shape))
    same = f"have shape {tuple(places.shape)} like places"
    alike = topk_weights.ndim == 2 and topk_weights.shape[1] == places.shape[1]
    if not alike:
        fail(_OP, "topk_weights", same, topk_weights.shape)
    check(topk_weights.shape[0] == places.shape[0], lambda: describe(_OP, "topk_weights", same, topk_weights.shape))
    for name, t, dtypes in (
        ("hidden_states", hidden_states, found.hidden_dtypes),
        ("places", places, (torch.int32,)),
        ("topk_weights", topk_weights, (torch.float32,)),
    ):
        if t.dtype not in dtypes:
            fail(_OP, name, f"have one of the dtypes {[str(d) for d in dtypes]}", t.dtype)
        if t.device != found.device:
            fail(_OP, name, f"be on {found.device} like the layer", t.device)
    dtype = hidden_states.dtype if out_dtype is None else out_dtype
    if dtype not in FLOATS:
        fail(_OP, "out_dtype", f"be None or one of {[str(d) for d in FLOATS]}", out_dtype)
    return found, dtype


def _host_experts(
    hidden_states: Tensor, places: Tensor, topk_weights: Tensor, layer: str, out_dtype: torch.dtype | None = None
) -> Tensor:
    found, dtype = _checked(hidden_states, places, topk_weights, layer, out_dtype)
    if not hidden_states.shape[0]:
        return hidden_states.new_empty(hidden_states.shape, dtype=dtype)
    with like_a_kernel(found.device.type):
        return found.run(hidden_states.contiguous(), places.contiguous(), topk_weights.contiguous(), dtype)


def _fake(
    hidden_states: Tensor, places: Tensor, topk_weights: Tensor, layer: str, out_dtype: torch.dtype | None = None
) -> Tensor:
    _, dtype = _checked(hidden_states, places, topk_weights, layer, out_dtype)
    return hidden_states.new_empty(hidden_states.shape, dtype=dtype)


attach(_OP, _host_experts, _host_experts, _fake)
