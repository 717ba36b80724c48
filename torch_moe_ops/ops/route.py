"""The op `moeq::route`: router logits to expert ids and weights.

On CUDA a Triton kernel computes it, elsewhere torch's own operations do. Both follow `torch_moe_ops.routing.reference`.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.core.check import fail
from torch_moe_ops.core.schemas import arguments
from torch_moe_ops.gradients.routing import logits_gradient
from torch_moe_ops.ops.autograd import Args, Rule
from torch_moe_ops.ops.bind import attach, like_a_kernel
from torch_moe_ops.routing.options import check_route
from torch_moe_ops.routing.reference import route_reference


def run_route(router_logits: Tensor, routing_bias: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    """moeq::route on checked arguments: the kernel where it runs, else route_reference."""
    device = router_logits.device
    if not _has_kernel(device):
        return route_reference(router_logits, routing_bias, *options)
    from torch_moe_ops.backends.triton_engine.routing_launch import route_triton

    if device.type != "cuda":
        return route_triton(router_logits, routing_bias, *options)
    with torch.cuda.device(device):
        return route_triton(router_logits, routing_bias, *options)


def kernel_reason(device: torch.device) -> str | None:
    """None where the routing kernel runs on this device (the `triton` backend's condition), else why not."""
    from torch_moe_ops.backends.triton import device_reason, package_reason

    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return package_reason() or device_reason(device.type, capability)


@cache
def _has_kernel(device: torch.device) -> bool:
    reason = kernel_reason(device)
    if reason is not None and device.type == "cuda":
        text = f"moeq::route: torch's own operations, a dozen launches, choose the experts on {device}: {reason}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    return reason is None


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
            return run_route(router_logits, routing_bias, *options)

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


def _backward(args: Args, results: Args, grads: tuple[Tensor, ...], needs: tuple[bool, ...]) -> dict[int, Tensor]:
    given = dict(zip(_NAMES, (*args, *_DEFAULTS[len(args) :]), strict=True))
    options = (given["routing_method"], given["routed_scaling_factor"], given["renormalize"])
    return {0: logits_gradient(grads[1], given["router_logits"], results[0], *options)}


_NAMES, _DEFAULTS = arguments("route")
# The bias chooses experts and is in no weight.
_RULE = Rule(_backward, lambda position, args: position == 0, constant=(1,), keeps=(0,))

attach("route", _implementation(devices=False), _implementation(devices=True), _fake, rule=_RULE)
