"""The op `moeq::route_hidden`: hidden states to expert ids and weights, the router's product included.

On Hopper one kernel does both for few tokens. Elsewhere it is a product (routing/product.py), and `moeq::route` of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.backends.sm90 import router as sm90_router
from torch_moe_ops.core.check import check, check_given, describe, fail
from torch_moe_ops.core.schemas import arguments
from torch_moe_ops.core.schemes import FLOATS
from torch_moe_ops.gradients.routing import logits_gradient, product_gradients
from torch_moe_ops.ops.autograd import Args, Rule
from torch_moe_ops.ops.bind import attach, like_a_kernel
from torch_moe_ops.ops.route import run_route
from torch_moe_ops.routing.options import check_route, check_shared
from torch_moe_ops.routing.product import router_logits

OP = "route_hidden"
Results = tuple[Tensor, Tensor, Tensor]


def check_product(
    op: str, hidden_states: Tensor, router_weight: Tensor, router_bias: Tensor | None, logits_dtype: torch.dtype
) -> None:
    """Raise unless these can be multiplied. Shapes and dtypes only."""
    names = [str(dtype) for dtype in FLOATS]
    for name, tensor in (("hidden_states", hidden_states), ("router_weight", router_weight)):
        check_given(op, name, tensor)
        if tensor.dtype not in FLOATS:
            fail(op, name, f"have one of the dtypes {names}", tensor.dtype)
    if hidden_states.ndim != 2:
        fail(op, "hidden_states", "have shape [num_tokens, hidden_size]", hidden_states.shape)
    hidden_size = hidden_states.shape[1]
    if router_weight.ndim != 2:
        fail(op, "router_weight", f"have shape [num_experts, {hidden_size}]", router_weight.shape)
    text = f"have shape [num_experts, {hidden_size}] for such hidden_states"
    check(router_weight.shape[1] == hidden_size, lambda: describe(op, "router_weight", text, router_weight.shape))
    if logits_dtype not in FLOATS:
        fail(op, "logits_dtype", f"be None or one of {names}", logits_dtype)
    if router_bias is None:
        return
    if router_bias.dtype not in FLOATS:
        fail(op, "router_bias", f"have one of the dtypes {names}", router_bias.dtype)
    shape = (router_weight.shape[0],)
    check(router_bias.shape == shape, lambda: describe(op, "router_bias", f"have shape {shape}", router_bias.shape))


def check_devices(op: str, hidden_states: Tensor, **others: Tensor | None) -> None:
    for name, tensor in others.items():
        if tensor is not None and tensor.device != hidden_states.device:
            fail(op, name, f"be on {hidden_states.device} like hidden_states", tensor.device)


def run_router(
    hidden_states: Tensor,
    router_weight: Tensor,
    router_bias: Tensor | None,
    routing: tuple[Any, ...],
    logits_dtype: torch.dtype,
    num_shared_experts: int = 0,
    shared_expert_weights: Tensor | None = None,
) -> Results:
    """Checked but for what a router's logits tell."""

    def check_routing(logits: Tensor) -> None:
        check_route(OP, logits, *routing)
        check_shared(OP, logits, routing[1], routing[2], num_shared_experts, shared_expert_weights)

    if sm90_router.takes(hidden_states, router_weight, routing[3]):
        logits = hidden_states.new_empty((hidden_states.shape[0], router_weight.shape[0]), dtype=logits_dtype)
        check_routing(logits)
        operands = (hidden_states, router_weight, router_bias)
        chosen = sm90_router.run(*operands, logits, routing, num_shared_experts, shared_expert_weights)
    else:
        logits = router_logits(hidden_states, router_weight, router_bias, logits_dtype)
        check_routing(logits)
        shared: dict[str, Any] = {"num_shared_experts": num_shared_experts}
        chosen = run_route(logits, *routing, **shared, shared_expert_weights=shared_expert_weights)
    return *chosen, logits


def _implementation(devices: bool, fake: bool = False) -> Any:
    def impl(
        hidden_states: Tensor,
        router_weight: Tensor,
        router_bias: Tensor | None,
        routing_bias: Tensor | None,
        routing_method: str,
        top_k: int,
        n_group: int = 0,
        topk_group: int = 0,
        routed_scaling_factor: float = 1.0,
        renormalize: bool | None = None,
        logits_dtype: torch.dtype | None = None,
        num_shared_experts: int = 0,
        shared_expert_weights: Tensor | None = None,
    ) -> Results:
        dtype = logits_dtype or torch.float32
        check_product(OP, hidden_states, router_weight, router_bias, dtype)
        if devices:
            biases = {"router_bias": router_bias, "routing_bias": routing_bias}
            given = {"router_weight": router_weight, **biases, "shared_expert_weights": shared_expert_weights}
            check_devices(OP, hidden_states, **given)
        routing = (routing_bias, routing_method, top_k, n_group, topk_group, routed_scaling_factor, renormalize)
        shared = (num_shared_experts, shared_expert_weights)
        if fake:
            return _shapes(hidden_states, router_weight, routing, dtype, *shared)
        with like_a_kernel(hidden_states.device.type):
            return run_router(hidden_states, router_weight, router_bias, routing, dtype, *shared)

    return impl


def _shapes(
    hidden_states: Tensor,
    router_weight: Tensor,
    routing: tuple[Any, ...],
    dtype: torch.dtype,
    num_shared_experts: int,
    shared_expert_weights: Tensor | None,
) -> Results:
    logits = hidden_states.new_empty((hidden_states.shape[0], router_weight.shape[0]), dtype=dtype)
    check_route(OP, logits, *routing)
    check_shared(OP, logits, routing[1], routing[2], num_shared_experts, shared_expert_weights)
    shape = (hidden_states.shape[0], routing[2] + num_shared_experts)
    ids = hidden_states.new_empty(shape, dtype=torch.int32)
    return ids, hidden_states.new_empty(shape, dtype=torch.float32), logits


def _backward(args: Args, results: Args, grads: tuple[Tensor, ...], needs: tuple[bool, ...]) -> dict[int, Tensor]:
    given = dict(zip(_NAMES, (*args, *_DEFAULTS[len(args) :]), strict=True))
    top_k, shared, found = given["top_k"], given["shared_expert_weights"], {}
    if any(needs[:3]):
        ids, logits = results
        options = (given["routing_method"], given["routed_scaling_factor"], given["renormalize"])
        grad = logits_gradient(grads[1][:, :top_k], logits.float(), ids[:, :top_k], *options) + grads[2].float()
        found = product_gradients(grad, args[0], args[1], args[2], needs[:3])
    if len(needs) > _SHARED and needs[_SHARED]:
        found[_SHARED] = grads[1][:, top_k:].to(shared.dtype)
    return found


_NAMES, _DEFAULTS = arguments(OP)
_SHARED = _NAMES.index("shared_expert_weights")
# routing_bias chooses experts and is in no weight.
_RULE = Rule(
    _backward,
    lambda position, args: position in (0, 1, 2, _SHARED),
    constant=(_NAMES.index("routing_bias"),),
    keeps=(0, 2),
)

attach(OP, _implementation(devices=False), _implementation(devices=True), _implementation(True, fake=True), rule=_RULE)
