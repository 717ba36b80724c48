"""The op `moeq::route`: router logits to expert ids and weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_moe_ops._check import fail
from torch_moe_ops.ops.bind import attach, like_a_kernel
from torch_moe_ops.routing import check_route, route_reference


def _implementation(devices: bool) -> Any:
    def impl(
        router_logits: Tensor,
        routing_bias: Tensor | None,
        routing_method: str,
        top_k: int,
        n_group: int = 0,
        topk_group: int = 0,
        routed_scaling_factor: float = 1.0,
        renormalize: bool | None = None,
    ) -> tuple[Tensor, Tensor]:
        options = (routing_method, top_k, n_group, topk_group, routed_scaling_factor, renormalize)
        check_route("route", router_logits, routing_bias, *options)
        if devices:
            _check_devices(router_logits, routing_bias)
        with like_a_kernel(router_logits.device.type):
            return route_reference(router_logits, routing_bias, *options)

    return impl


def _fake(
    router_logits: Tensor,
    routing_bias: Tensor | None,
    routing_method: str,
    top_k: int,
    n_group: int = 0,
    topk_group: int = 0,
    routed_scaling_factor: float = 1.0,
    renormalize: bool | None = None,
) -> tuple[Tensor, Tensor]:
    options = (routing_method, top_k, n_group, topk_group, routed_scaling_factor, renormalize)
    check_route("route", router_logits, routing_bias, *options)
    _check_devices(router_logits, routing_bias)
    shape = (router_logits.shape[0], top_k)
    ids = router_logits.new_empty(shape, dtype=torch.int32)
    return ids, router_logits.new_empty(shape, dtype=torch.float32)


def _check_devices(router_logits: Tensor, routing_bias: Tensor | None) -> None:
    if routing_bias is not None and routing_bias.device != router_logits.device:
        fail("route", "routing_bias", f"be on {router_logits.device} like router_logits", routing_bias.device)


attach("route", _implementation(devices=False), _implementation(devices=True), _fake)
