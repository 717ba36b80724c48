"""Experts exchanged between device and host, each side in the layout of its backend."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from torch_moe_ops.host_experts.split import Split
from torch_moe_ops.prepared.prepared_weights import PreparedWeights
from torch_moe_ops.prepared.restoring import restore, restored_views
from torch_moe_ops.weights.raw_weights import RawWeights


def move_experts(on_device: PreparedWeights, on_host: PreparedWeights, old: Split, new: Split) -> None:
    """Write the experts of `new` into the tensors of both.

    Raises ValueError, before anything was written, where a layout has no inverse.
    """
    raw = _joined(restored_views(on_device).to("cpu"), restore(on_host), old)
    shares = [new.share(raw, experts) for experts in (new.device, new.host)]
    for w, share in zip((on_device, on_host), shares, strict=True):
        w.update_(share.to(w.device))


def _joined(here: RawWeights, there: RawWeights, split: Split) -> RawWeights:
    """All experts, in the router's order. What is one value for all experts is the same on both sides."""
    order = torch.tensor(split.device + split.host, device="cpu").argsort()
    others = there.tensors()
    tensors: dict[str, Any] = {}
    for name, t in here.tensors().items():
        if t.ndim:
            both = torch.cat((_bytes(t), _bytes(others[name])))[order]
            tensors[name] = both.view(t.dtype)
    return dataclasses.replace(here, **tensors)


def _bytes(t: torch.Tensor) -> torch.Tensor:
    # Not every operation takes float8.
    return t.view(torch.uint8) if t.element_size() == 1 else t
