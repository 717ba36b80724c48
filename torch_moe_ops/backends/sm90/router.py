"""Routing by the kernels for Hopper: of logits (`moeq::route`), or of hidden states, whose product with the router and
the choice are one launch for few tokens (`moeq::route_hidden`)."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_moe_ops.backends import triton
from torch_moe_ops.backends.sm90.common import CAPABILITY, router_of
from torch_moe_ops.core import device_code, extension
from torch_moe_ops.core.kernel_facts import Sm90
from torch_moe_ops.core.router_facts import RouteHidden

# More tokens, or larger weights, are faster as a matrix product and a launch of routing behind it
# (benchmarks/results/h200_route_hidden.jsonl).
MAX_TOKENS = 64
MAX_BYTES = 1 << 20
_ALIGNMENT = 16  # bytes of a load
_FAST_GROUP = 32  # experts: one of each lane
_BYTES_OF_8 = 640 << 10  # weights that eight multiprocessors read as fast as sixteen


class Plan(NamedTuple):
    """How the kernel divides its work: blocks of a cluster, 8 or 16, and warps of each."""

    blocks: int
    warps: int


def plan_of(num_experts: int, hidden_size: int) -> Plan:
    """By the router's shape alone, so that a logit's bits do not depend on how many tokens there are."""
    large = 2 * num_experts * hidden_size > _BYTES_OF_8
    few_tiles = num_experts <= 32
    return Plan(16 if large else 8, 8 if few_tiles else RouteHidden.MAX_WARPS)


@cache
def _runs_on(device: torch.device) -> bool:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != CAPABILITY:
        return False
    return not extension.cuda_extension_reason() and device_code.missing(CAPABILITY, "a") is None


def takes_logits(router_logits: Tensor, n_group: int) -> bool:
    """Whether the kernel runs checked arguments of moeq::route: where it can, but for groups of other sizes than 32
    where Triton's is there, which is faster for those of 16 (benchmarks/results/h200_route_kernels.jsonl)."""
    if n_group > Sm90.ROUTE_GROUPS or not _runs_on(router_logits.device):
        return False
    return n_group <= 1 or router_logits.shape[1] == _FAST_GROUP * n_group or triton.package_reason() is not None


def route(
    router_logits: Tensor,
    routing: tuple[Any, ...],
    num_shared_experts: int,
    shared_expert_weights: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(topk_ids, topk_weights) of arguments that `takes_logits` takes, in one launch; columns of logits that are apart
    are copied before.

    Args:
        routing: of moeq::route, from routing_bias to renormalize.
    """
    router = router_of((router_logits, *routing))
    assert router is not None, "`takes_logits` has seen that there are few groups"
    ids, weights = _results(router_logits, router.top_k + num_shared_experts)
    shared = None if shared_expert_weights is None else shared_expert_weights.contiguous()
    torch.ops.moeq_C.route_sm90(*router, ids, weights, num_shared_experts, shared)
    return ids, weights


def _results(logits: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    ids = torch.empty((logits.shape[0], columns), dtype=torch.int32, device=logits.device)
    return ids, torch.empty((logits.shape[0], columns), dtype=torch.float32, device=logits.device)


def takes(hidden_states: Tensor, router_weight: Tensor, n_group: int) -> bool:
    """Whether the kernel runs checked arguments of moeq::route_hidden on few tokens."""
    if hidden_states.dtype is not torch.bfloat16 or router_weight.dtype is not torch.bfloat16:
        return False
    (tokens, hidden_size), experts = hidden_states.shape, router_weight.shape[0]
    return (
        0 < tokens <= MAX_TOKENS
        and 2 * experts * hidden_size <= MAX_BYTES
        and experts <= RouteHidden.MAX_ROUTER_EXPERTS
        and hidden_size > 0
        and hidden_size % RouteHidden.SIZE_MULTIPLE == 0
        and n_group <= Sm90.ROUTE_GROUPS
        and _runs_on(hidden_states.device)
    )


def run(
    hidden_states: Tensor,
    router_weight: Tensor,
    router_bias: Tensor | None,
    logits: Tensor,
    routing: tuple[Any, ...],
    num_shared_experts: int,
    shared_expert_weights: Tensor | None,
    plan: Plan | None = None,
) -> tuple[Tensor, Tensor]:
    """(topk_ids, topk_weights) of arguments that `takes` takes; fills logits [num_tokens, num_experts].

    Args:
        routing: of moeq::route, from routing_bias to renormalize.
    """
    router = router_of((logits, *routing))
    assert router is not None, "`takes` has seen that there are few groups"
    experts, hidden_size = router_weight.shape
    ids, weights = _results(logits, router.top_k + num_shared_experts)
    bias = None if router_bias is None else router_bias.contiguous()
    shared = None if shared_expert_weights is None else shared_expert_weights.contiguous()
    plan = plan or plan_of(experts, hidden_size)
    operands = (in_rows(hidden_states), in_rows(router_weight), bias)
    with torch.cuda.device(logits.device):
        torch.ops.moeq_C.route_hidden_sm90(*router, ids, weights, *operands, num_shared_experts, shared, *plan)
    return ids, weights


def in_rows(matrix: Tensor) -> Tensor:
    """The matrix, or a copy where its rows do not start at multiples of 16 bytes."""
    rows, columns = matrix.stride()
    if columns == 1 and rows % RouteHidden.SIZE_MULTIPLE == 0 and matrix.data_ptr() % _ALIGNMENT == 0:
        return matrix
    return matrix.clone(memory_format=torch.contiguous_format)
