"""The derivatives of the expert ops, for autograd.

An expert op saves its arguments alone: its backward, `moeq::moe_routed_backward`, makes everything else again. Where a
gradient is wanted of a monolithic op, it runs as its two parts, so that the routing is made, and saved, once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.core.schemas import arguments
from torch_moe_ops.gradients.experts import Wanted
from torch_moe_ops.ops.autograd import Args, Rule
from torch_moe_ops.ops.backward import arguments_of
from torch_moe_ops.ops.binder import Binder

ROUTE_OPTIONS = ("routing_method", "top_k", "n_group", "topk_group", "routed_scaling_factor", "renormalize")


def routed_rule(binder: Binder) -> Rule:
    """Of a routed op: gradients of hidden states, routing weights and biases."""
    at = {name: binder.position[name] for name in Wanted._fields}
    hidden, scale = at["hidden_states"], binder.position["hidden_states_scale"]

    def differentiable(position: int, args: Args) -> bool:
        return position in at.values() and (position != hidden or args[scale] is None)

    def backward(args: Args, results: Args, grads: tuple[Tensor, ...], needs: tuple[bool, ...]) -> dict[int, Tensor]:
        wanted = Wanted(*(i < len(needs) and needs[i] for i in at.values()))
        found = torch.ops.moeq.moe_routed_backward(*arguments_of(grads[0], binder.bind(args, {}), wanted))
        pairs = zip(at.values(), found, wanted, strict=True)
        return {position: gradient for position, gradient, is_wanted in pairs if is_wanted}

    return Rule(backward, differentiable)


def routed_parts(op: str, binder: Binder, check: Callable[[Args], object]) -> Callable[..., Tensor]:
    """A monolithic op as `route` and the routed op: the same result, by the contract of the pair.

    check: raises what the op itself would; its parts know less of the call.
    """
    routed = getattr(torch.ops.moeq, f"{op}_routed")
    names, _ = arguments(f"{op}_routed")
    route_at = [binder.position[name] for name in ("router_logits", "routing_bias", *ROUTE_OPTIONS)]

    def run(*args: Any) -> Tensor:
        check(args)
        full = binder.fill(args, {})
        given = dict(zip(binder.names, full, strict=False))
        ids, weights = torch.ops.moeq.route(*(full[i] for i in route_at))
        given |= {
            "topk_ids": ids,
            "topk_weights": weights,
            "num_experts": given["router_logits"].shape[1],
            "router_weight_on_input": given["routing_method"] == "llama4",
        }
        return routed(*(given[name] for name in names))

    return run
