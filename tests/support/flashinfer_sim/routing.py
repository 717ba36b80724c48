"""Routing by FlashInfer's methods, token by token, as its documentation states them; weights come out as bfloat16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import tiers


def decode(a: dict[str, Any], ids_name: str, weights_name: str) -> tuple[Tensor, Tensor]:
    """ids and weights of a call, whichever way they came. Without a mode, packed ids speak for themselves."""
    logits, ids = a.get("routing_logits"), a.get(ids_name)
    if logits is not None:
        assert logits.dtype in (torch.float32, torch.bfloat16), logits.dtype
        assert logits.shape == (a["hidden_states"].shape[0], a["num_experts"])
        return route(a)
    assert ids is not None and ids.dtype == torch.int32 and ids.shape[1] == a["top_k"]
    assert ids.is_contiguous()
    tiers.check_given(a)
    if a.get("routing_input_mode", 1) == 2:
        weights = a[weights_name]
        assert weights.dtype in (torch.float32, torch.bfloat16) and weights.shape == ids.shape
        return ids.long(), weights.double()
    return (ids >> 16).long(), ids.to(torch.int16).view(torch.bfloat16).double()


def route(a: dict[str, Any]) -> tuple[Tensor, Tensor]:
    from flashinfer.tllm_enums import RoutingMethodType

    method = RoutingMethodType(a["routing_method_type"]).name
    bias = a["routing_bias"]
    if bias is not None:
        assert bias.shape == (a["num_experts"],) and bias.dtype in (torch.float32, torch.bfloat16)
    tiers.check_logits(method, a)
    rows = [_one(method, z.double(), bias, a) for z in a["routing_logits"]]
    ids, weights = (torch.stack(part) for part in zip(*rows, strict=True))
    return ids, weights.bfloat16().double()


def _top(score: Tensor, k: int) -> Tensor:
    return score.sort(descending=True, stable=True).indices[:k]


def _one(method: str, z: Tensor, bias: Tensor | None, a: dict[str, Any]) -> tuple[Tensor, Tensor]:
    k, p, s = a["top_k"], torch.sigmoid(z), torch.softmax(z, 0)
    if method in ("Default", "RenormalizeNaive"):
        ids = _top(s, k)
        return ids, s[ids] if method == "Default" else s[ids] / s[ids].sum()
    if method in ("Renormalize", "TopK", "TopKSigmoid"):
        ids = _top(z, k)
        return ids, {"Renormalize": torch.softmax(z[ids], 0), "TopK": z[ids], "TopKSigmoid": p[ids]}[method]
    if method in ("Sigmoid", "SigmoidRenorm"):
        ids = _top(p, k)
        return ids, p[ids] if method == "Sigmoid" else p[ids] / (p[ids].sum() + 1e-20)
    assert method in ("DeepSeekV3", "MiniMax2"), method
    choice = p if bias is None else p + bias.double()  # with groups, the kernel takes none for zero
    groups, kept = a["n_group"] or 0, a["topk_group"] or 0
    if method == "DeepSeekV3" and groups > 1:
        parts = choice.view(groups, -1)
        best = _top(parts.topk(2).values.sum(1), kept)
        masked = torch.full_like(parts, -torch.inf)
        masked[best] = parts[best]
        choice = masked.flatten()
    ids = _top(choice, k)
    factor = (a["routed_scaling_factor"] or 1.0) if method == "DeepSeekV3" else 1.0
    return ids, p[ids] / (p[ids].sum() + 1e-20) * factor
