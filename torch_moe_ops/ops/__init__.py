"""Implementations and fakes of `torch.ops.moeq.*`. Importing this package attaches all of them."""

from __future__ import annotations

from torch_moe_ops import backends  # the expert ops look backends up by name
from torch_moe_ops.ops import (
    ep_experts,
    expert_parallel,
    grouped_linear,
    host_experts,
    lora,
    moe,
    moe_hidden,
    moe_routed,
    quantize,
    route,
    route_hidden,
    swizzle,
)

__all__ = [
    "backends",
    "ep_experts",
    "expert_parallel",
    "grouped_linear",
    "host_experts",
    "lora",
    "moe",
    "moe_hidden",
    "moe_routed",
    "quantize",
    "route",
    "route_hidden",
    "swizzle",
]
