"""Launches the kernels of kernels.py where Triton runs; elsewhere torch's own operations do the same, bit for bit."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.backends.triton import device_reason, package_reason

_PLACE_BLOCK, _SUM_BLOCK = 256, 1024
# Of an unrolled sum.
MOST_PARTS = 64


@cache
def has_kernels(device: torch.device) -> bool:
    """Whether the conditions of the `triton` backend hold on the device."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return package_reason() is None and device_reason(device.type, capability) is None


def _launch(kernel: Any, device: torch.device, programs: int, *args: Any, **constants: Any) -> None:
    if not programs:
        return
    if device.type != "cuda":
        kernel[(programs,)](*args, **constants)
        return
    with torch.cuda.device(device):
        kernel[(programs,)](*args, **constants)


def place(topk_ids: Tensor, first: Tensor, count: Tensor, slots: Tensor, load: Tensor, rank: int) -> Tensor:
    """placing.place in one launch."""
    from torch_moe_ops.backends.triton_engine.plan import target_of
    from torch_moe_ops.transports.kernels import place_kernel

    ids, places = topk_ids.contiguous(), torch.empty(topk_ids.shape, dtype=torch.int32, device=topk_ids.device)
    tables = (first.contiguous(), count.contiguous(), slots.contiguous())
    sizes = (ids.numel(), first.shape[0], slots.shape[0], rank)
    constants: dict[str, Any] = {"TOP_K": ids.shape[1], "BLOCK": _PLACE_BLOCK, "PDL": target_of(ids.device)["PDL"]}
    if constants["PDL"]:
        constants["launch_pdl"] = True
    programs = -(-ids.numel() // _PLACE_BLOCK)
    _launch(place_kernel, ids.device, programs, ids, *tables, load, places, *sizes, **constants)
    return places


def ordered_sum(parts: Tensor, out_dtype: torch.dtype) -> Tensor:
    """nccl.ordered_sum of parts [n, rows, columns], each of them contiguous, in one launch."""
    from torch_moe_ops.backends.triton_engine.plan import target_of
    from torch_moe_ops.transports.kernels import ordered_sum_kernel

    out = torch.empty(parts.shape[1:], dtype=out_dtype, device=parts.device)
    constants: dict[str, Any] = {"PARTS": parts.shape[0], "BLOCK": _SUM_BLOCK}
    constants["USE_PTX"] = target_of(parts.device)["USE_PTX"]
    programs = -(-out.numel() // _SUM_BLOCK)
    _launch(ordered_sum_kernel, parts.device, programs, parts, out, out.numel(), parts.stride(0), **constants)
    return out
