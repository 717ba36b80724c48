"""What the backends of the Hopper kernels have in common: what they need, and routers as their ops take them."""

from __future__ import annotations

from typing import Any

import torch

from torch_moe_ops.backends.registry import Requirement, available, one_of
from torch_moe_ops.core import device_code, extension
from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.core.kernel_facts import Router, Sm90
from torch_moe_ops.core.problem import Problem
from torch_moe_ops.core.routing_methods import METHODS
from torch_moe_ops.core.schemes import SCHEMES

CAPABILITY = (9, 0)
MAX_EXPERTS = Sm90.MAX_EXPERTS


def _capability_reason(problem: Problem) -> str | None:
    if problem.device != "cuda" or problem.capability in (None, CAPABILITY):
        return None
    return (
        f"compute capability must be {CAPABILITY}, whose instructions the kernels are made of, got {problem.capability}"
    )


def reads(*dtypes: torch.dtype) -> Requirement:
    """Hidden states are of one of the dtypes, or unknown."""

    def unmet(problem: Problem) -> str | None:
        if problem.dtype is None or problem.dtype in dtypes:
            return None
        return f"dtype must be {' or '.join(map(str, dtypes))}, which is what the kernels read, got {problem.dtype}"

    return Requirement(unmet)


def _experts_reason(problem: Problem) -> str | None:
    if problem.num_local_experts <= MAX_EXPERTS:
        return None
    return f"num_local_experts must be at most {MAX_EXPERTS}, got {problem.num_local_experts}"


def _extension_reason() -> str | None:
    return extension.cuda_extension_reason() or device_code.missing(CAPABILITY, "a")


def check_device(call: ExpertsCall) -> None:
    """Raise where a layer that was prepared for Hopper is called on another device."""
    device = call.hidden_states.device
    if device_code.missing_on(device, "a") is not None:
        op = f"{SCHEMES[call.scheme].op_prefix}moe_routed"
        device_code.check_device(op, "hidden_states", device, "a")


def runs_on(device: torch.device) -> bool:
    """Whether the kernels are there for this device."""
    if device.type != "cuda" or extension.cuda_extension_reason():
        return False
    return device_code.missing_on(device, "a") is None


def needs(*dtypes: torch.dtype) -> tuple[Requirement, ...]:
    """Of every backend of Hopper kernels that read hidden states of these dtypes."""
    return (
        one_of("device", "cuda"),
        Requirement(_capability_reason),
        available(_extension_reason, extension.BUILD_CUDA),
        reads(*dtypes),
        Requirement(_experts_reason),
    )


NEEDS = needs(torch.bfloat16)


NO_ROUTER = Router(None, None, "identity", "identity", False, 1, 0, 0, 1.0)


def router_of(routing: tuple[Any, ...]) -> Router | None:
    """The arguments of moeq::route, checked; None where the kernels do not do it (more than 32 groups)."""
    router_logits, routing_bias, routing_method, top_k, n_group, topk_group, factor, renormalize = routing
    if n_group > Sm90.ROUTE_GROUPS:
        return None
    method = METHODS[routing_method]
    # Of one expert `contiguous` would take any stride for one.
    rows = router_logits.stride(1) == 1
    logits = router_logits if rows else router_logits.clone(memory_format=torch.contiguous_format)
    bias = None if routing_bias is None else routing_bias.contiguous()
    divide = method.renormalizes if renormalize is None else renormalize
    weight = method.weight or method.score
    return Router(
        router_logits=logits,
        routing_bias=bias,
        score=method.score,
        weight=weight,
        renormalize=divide,
        top_k=top_k,
        n_group=n_group,
        topk_group=topk_group,
        routed_scaling_factor=float(factor),
    )
