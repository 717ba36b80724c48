"""Tensors coded by coordinate (each byte says where it came from), so that no two wrong orders look alike."""

from __future__ import annotations

import torch
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.core.schemes import SCHEMES


def coded(*shape: int) -> Tensor:
    """Bytes that follow from their position by a hash without short periods along any dimension."""
    index = torch.arange(torch.Size(shape).numel())
    mixed = (index * 2654435761) & 0xFFFFFFFF
    return ((mixed >> 24) ^ (mixed >> 9) ^ (index // 251)).to(torch.uint8).view(shape)


def coded_raw(scheme_name: str, hidden: int, inter: int, gated: bool = True) -> moe.RawWeights:
    """One expert whose bytes are coded by coordinate (NaN patterns too: nothing may interpret them)."""
    scheme = SCHEMES[scheme_name]
    dtype = scheme.weight_dtypes[0]
    halves, fields = 2 if gated else 1, {}
    for name, n, k, parts in (("w13", halves * inter, hidden, halves), ("w2", hidden, inter, 1)):
        storage = scheme.storage_k(k)
        fields[name] = coded(1, n, storage * dtype.itemsize).view(dtype)
        if scheme.scales is not None:
            shapes = scheme.scales.shapes(n, k, parts)
            shape, kind = (shapes[1] if scheme.scales.kind == "channel" else shapes[0]), scheme.scales.dtypes[0]
            fields[f"{name}_scale"] = coded(1, *shape[:-1], shape[-1] * kind.itemsize).view(kind)
    if scheme.has_scale_2:
        fields |= {"w13_scale_2": torch.ones(1, halves), "w2_scale_2": torch.ones(1)}
    return moe.RawWeights(scheme=scheme_name, **fields)


def swapped(w13: Tensor) -> Tensor:
    """[gate; up] -> [up; gate], as FlashInfer's own preparation takes it."""
    return torch.cat([w13[:, w13.shape[1] // 2 :], w13[:, : w13.shape[1] // 2]], 1).contiguous()
