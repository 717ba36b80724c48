"""The op `moeq::route`: router logits to expert ids and weights.

On Hopper a kernel of ours computes it, on other GPUs Triton's, elsewhere torch's own operations do. All follow
`torch_moe_ops.routing.reference`.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.backends.sm90 import router as sm90_router
from torch_moe_ops.core.check import fail
from torch_moe_ops.core.schemas import arguments
from torch_moe_ops.gradients.routing import logits_gradient
from torch_moe_ops.ops.autograd import Args, Rule
from torch_moe_ops.ops.bind import attach, like_a_kernel
from torch_moe_ops.routing.options import check_route, check_shared
from torch_moe_ops.routing.reference import append_shared, route_reference


def run_route(
    router_logits: Tensor,
    routing_bias: Tensor | None,
    *options: Any,
    num_shared_experts: int = 0,
    shared_expert_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """moeq::route on checked arguments, all of them: a kernel where one runs, else route_reference."""
    device = router_logits.device
    if sm90_router.takes_logits(router_logits, n_group=options[2]):
        routing = (routing_bias, *options)
        return sm90_router.route(router_logits, routing, num_shared_experts, shared_expert_weights)
    if not _has_kernel(device):
        chosen = route_reference(router_logits, routing_bias, *options)
        if not num_shared_experts:
            return chosen
        return append_shared(*chosen, router_logits.shape[1], num_shared_experts, shared_expert_weights)
    from torch_moe_ops.backends.triton_engine.routing_launch import route_triton

    shared = (num_shared_experts, shared_expert_weights)
    if device.type != "cuda":
        return route_triton(router_logits, routing_bias, *options, shared=shared)
    with torch.cuda.device(device):
        return route_triton(router_logits, routing_bias, *options, shared=shared)


def kernel_reason(device: torch.device) -> str | None:
    """None where Triton's routing kernel runs on this device (the `triton` backend's condition), else why not."""
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
        num_shared_experts: int = 0,
        shared_expert_weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        options = (routing_method, top_k, n_group, topk_group, routed_scaling_factor, renormalize)
        check_route("route", router_logits, routing_bias, *options)
        if num_shared_experts or shared_expert_weights is not None:
            check_shared("route", router_logits, routing_method, top_k, num_shared_experts, shared_expert_weights)
        if devices:
            _check_devices(router_logits, routing_bias, shared_expert_weights)
        with like_a_kernel(router_logits.device.type):
            return run_route(
                router_logits,
                routing_bias,
                *options,
                num_shared_experts=num_shared_experts,
                shared_expert_weights=shared_expert_weights,
            )

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
    num_shared_experts: int = 0,
    shared_expert_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    options = (routing_method, top_k, n_group, topk_group, routed_scaling_factor, renormalize)
    check_route("route", router_logits, routing_bias, *options)
    check_shared("route", router_logits, routing_method, top_k, num_shared_experts, shared_expert_weights)
    _check_devices(router_logits, routing_bias, shared_expert_weights)
    shape = (router_logits.shape[0], top_k + num_shared_experts)
    ids = router_logits.new_empty(shape, dtype=torch.int32)
    return ids, router_logits.new_empty(shape, dtype=torch.float32)


def _check_devices(router_logits: Tensor, routing_bias: Tensor | None, shared_expert_weights: Tensor | None) -> None:
    for name, tensor in (("routing_bias", routing_bias), ("shared_expert_weights", shared_expert_weights)):
        if tensor is not None and tensor.device != router_logits.device:
            fail("route", name, f"be on {router_logits.device} like router_logits", tensor.device)


def _backward(args: Args, results: Args, grads: tuple[Tensor, ...], needs: tuple[bool, ...]) -> dict[int, Tensor]:
    given = dict(zip(_NAMES, (*args, *_DEFAULTS[len(args) :]), strict=True))
    options = (given["routing_method"], given["routed_scaling_factor"], given["renormalize"])
    top_k, shared, found = given["top_k"], given["shared_expert_weights"], {}
    if needs[0]:
        chosen, grad = results[0][:, :top_k], grads[1][:, :top_k]
        found[0] = logits_gradient(grad, given["router_logits"], chosen, *options)
    if len(needs) > _SHARED and needs[_SHARED]:
        found[_SHARED] = grads[1][:, top_k:].to(shared.dtype)
    return found


_NAMES, _DEFAULTS = arguments("route")
_SHARED = _NAMES.index("shared_expert_weights")
# The bias chooses experts and is in no weight.
_RULE = Rule(_backward, lambda position, args: position in (0, _SHARED), constant=(1,), keeps=(0,))

attach("route", _implementation(devices=False), _implementation(devices=True), _fake, rule=_RULE)
