"""Layers that are divided between a device and the host, with a batch and what the whole layer makes of it."""

from __future__ import annotations

from typing import Any

import torch
from problems import Case, make_batch, make_raw
from torch import Tensor

import torch_moe_ops as moe

# Sums of the two parts are added in another order than those of the whole layer: a few roundings of float32.
SUMS = {"rtol": 2e-5, "atol": 2e-5}
# And where the result is bfloat16: the neighbour.
NEIGHBOUR = {"rtol": 2**-7, "atol": 1e-5}


def divided(case: Case, host: Any, device: str = "cpu", **options: Any) -> moe.HostExperts:
    return moe.HostExperts(make_raw(case), host, act_format=case.act_format, device=device, **options)


def whole(case: Case, device: str = "cpu", **options: Any) -> moe.PreparedWeights:
    return moe.prepare(make_raw(case), act_format=case.act_format, device=device, **options)


def batch(case: Case, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """hidden_states, topk_ids, topk_weights."""
    return make_batch(case, device)


def result(w: moe.PreparedWeights, given: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    return moe.fused_moe_routed(*given, w, out_dtype=dtype)
