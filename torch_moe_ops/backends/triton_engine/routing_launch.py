"""Launches the routing kernel."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from torch_moe_ops.backends.triton_engine.plan import target_of
from torch_moe_ops.backends.triton_engine.routing import route_kernel
from torch_moe_ops.core.routing_methods import METHODS

# Values of the tile that one warp holds. Beyond it a barrier per reduction costs less than longer loops.
_ONE_WARP = 1024
_MAX_WARPS = 8
# Up to here the next kernel may start early: with more tokens its waiting blocks take room from this one's.
_EARLY_TOKENS = 512


def _launch(grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    route_kernel[grid](*args, **constants)


def _num_warps(tile: int) -> int:
    return min(_MAX_WARPS, max(1, 2 * tile // _ONE_WARP)) if tile > _ONE_WARP else 1


def route_triton(
    router_logits: Tensor,
    routing_bias: Tensor | None,
    routing_method: str,
    top_k: int,
    n_group: int = 0,
    topk_group: int = 0,
    routed_scaling_factor: float = 1.0,
    renormalize: bool | None = None,
    *,
    shared: tuple[int, Tensor | None] = (0, None),
) -> tuple[Tensor, Tensor]:
    """`torch_moe_ops.routing.reference.route_reference` in one launch on the current stream of the logits' device.

    Args: as `moeq::route`, already checked by check_route; on a CUDA device, or on the CPU in Triton's interpreter.
        shared: num_shared_experts and shared_expert_weights, checked by check_shared.

    Returns: topk_ids [num_tokens, top_k + shared experts] int32 and topk_weights likewise float32. On CUDA bit for bit
    what torch gives there, but for methods that divide by the softmax sum over all experts: its order is another (4e-7
    relative).
    """
    num_tokens, num_experts = router_logits.shape
    num_shared, shared_weights = shared
    shape = (num_tokens, top_k + num_shared)
    ids = torch.empty(shape, dtype=torch.int32, device=router_logits.device)
    weights = torch.empty(shape, dtype=torch.float32, device=router_logits.device)
    if not num_tokens:
        return ids, weights
    method = METHODS[routing_method]
    groups = max(n_group, 1)
    groups_padded = triton.next_power_of_2(groups)
    group_size = num_experts // groups
    size_padded = triton.next_power_of_2(group_size)
    target = target_of(router_logits.device)
    target = target | {"PDL": target["PDL"] and num_tokens <= _EARLY_TOKENS}
    # As torch computes: nothing fused, and a subnormal mass still has its place in the order.
    options: dict[str, Any] = {"enable_fp_fusion": False, "enable_reflect_ftz": False} if target["USE_PTX"] else {}
    if target["PDL"]:
        options["launch_pdl"] = True
    _launch(
        (num_tokens,),
        router_logits,
        weights if routing_bias is None else routing_bias.contiguous(),
        ids,
        weights,
        weights if shared_weights is None else shared_weights.contiguous(),
        *router_logits.stride(),
        float(routed_scaling_factor),
        SCORE=method.score,
        WEIGHT=method.weight or method.score,
        HAS_BIAS=routing_bias is not None,
        RENORMALIZE=method.renormalizes if renormalize is None else renormalize,
        TOP_K=top_k,
        K_PADDED=triton.next_power_of_2(top_k),
        GROUPS=groups,
        GROUPS_PADDED=groups_padded,
        TOPK_GROUP=topk_group if groups > 1 else 1,
        GROUP_SIZE=group_size,
        GROUP_SIZE_PADDED=size_padded,
        SHARED=num_shared,
        SHARED_PADDED=triton.next_power_of_2(max(num_shared, 1)),
        HAS_SHARED_WEIGHTS=shared_weights is not None,
        num_warps=_num_warps(groups_padded * size_padded),
        **target,
        **options,
    )
    return ids, weights
