"""What of our routing FlashInfer's kernels compute themselves, and how routing is handed to them otherwise."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_moe_ops.backends.flashinfer import package

# llama4 is not among them: most kernels weight the output where our contract weights the input.
METHODS = {
    "default": "Default",
    "renormalize": "Renormalize",
    "renormalize_naive": "RenormalizeNaive",
    "deepseek_v3": "DeepSeekV3",
    "topk": "TopK",
    "sigmoid_renorm": "SigmoidRenorm",
    "minimax2": "MiniMax2",
    "sigmoid": "Sigmoid",
    "topk_sigmoid": "TopKSigmoid",
}
# What a method does where the caller leaves `renormalize` open; the kernels cannot be told otherwise.
_RENORMALIZES = {name: name not in ("default", "topk", "sigmoid", "topk_sigmoid") for name in METHODS}

MAX_EXPERTS, MAX_TOP_K = 2048, 32  # of the kernels that sort tokens by given ids, and of renormalize
# The most experts and the most top_k that kernels are compiled for, method by method, in every supported release
# (RoutingCustomPolicy.cuh). deepseek_v3: without groups.
_SMALL, _BIASED, _ALL = (256, 8), (1024, 32), (MAX_EXPERTS, MAX_TOP_K)
COMPILED = {
    "default": _SMALL,
    "renormalize": _ALL,
    "renormalize_naive": _ALL,
    "deepseek_v3": _BIASED,
    "topk": _SMALL,
    "sigmoid_renorm": _SMALL,
    "minimax2": _BIASED,
    "sigmoid": _SMALL,
    "topk_sigmoid": _SMALL,
}
_READ_A_BIAS = ("deepseek_v3", "minimax2")  # without looking whether there is one
_EXPERTS_MULTIPLE = 4  # older releases throw for other numbers of experts
FP8_BLOCK_LAUNCHER = ("fp8_block", "mxfp8")  # schemes of trtllm_fp8_block_scale_moe, which asks for more
LOGITS_DTYPES = (torch.float32, torch.bfloat16)


class Routing(NamedTuple):
    """The arguments of moeq::route."""

    router_logits: Tensor
    bias: Tensor | None
    method: str
    top_k: int
    n_group: int
    topk_group: int
    scaling_factor: float
    renormalize: bool | None


def kernel_unmet(scheme: str, routing: Routing) -> str | None:
    """Why a kernel cannot route like this, or None. moeq::route does it then, and the routed kernel the rest."""
    name = METHODS.get(routing.method)
    if name is None or not package.has_member("RoutingMethodType", name):
        return f"routing_method must be one of {list(METHODS)} that the installed release has, got {routing.method!r}"
    if routing.renormalize not in (None, _RENORMALIZES[routing.method]):
        return f"renormalize must be {_RENORMALIZES[routing.method]} for {routing.method}, got {routing.renormalize}"
    if routing.method != "deepseek_v3" and routing.scaling_factor != 1.0:
        return f"routed_scaling_factor must be 1 for {routing.method}, got {routing.scaling_factor}"
    experts = routing.router_logits.shape[1]
    if routing.n_group > 1:
        return _groups_unmet(routing, experts)
    return sizes_unmet(scheme, routing.method, experts, routing.top_k)


def sizes_unmet(scheme: str, method: str, experts: int, top_k: int) -> str | None:
    """Why no kernel is compiled for one of METHODS, without groups, with so many experts, or None."""
    most_experts, most = COMPILED[method]
    if scheme in FP8_BLOCK_LAUNCHER and method == "deepseek_v3":
        most = 8 if experts <= 384 else 22
    if experts > most_experts or top_k > most:
        return f"{method} must have at most {most_experts} experts and top_k {most}, got {experts} and {top_k}"
    if experts % _EXPERTS_MULTIPLE:
        return f"the number of experts must be a multiple of {_EXPERTS_MULTIPLE}, got {experts}"
    return None


def _groups_unmet(routing: Routing, experts: int) -> str | None:
    if routing.method != "deepseek_v3" or routing.bias is None:
        return f"n_group must be at most 1 unless deepseek_v3 has a bias, got {routing.n_group}"
    groups, kept, top_k = routing.n_group, routing.topk_group, routing.top_k
    most = 8 if experts <= 384 else 22
    fits = groups <= 8 and kept <= 4 and experts <= 512 and experts % 4 == 0 and experts <= 32 * groups
    fits = fits and top_k <= most and top_k < kept * experts // groups
    if fits:
        return None
    sizes = f"n_group={groups}, topk_group={kept}, {experts} experts, top_k={top_k}"
    return f"groups must be at most 8 of at most 32 experts, of which at most 4 are kept, top_k {most}, got {sizes}"


def logits_arguments(scheme: str, routing: Routing) -> dict[str, Any]:
    """The arguments of a monolithic function that say how to route."""
    grouped = routing.n_group > 1
    # The launcher of fp8_block divides by n_group for this method, whether there are groups or not.
    ones = scheme in FP8_BLOCK_LAUNCHER and routing.method == "deepseek_v3"
    logits, bias = routing.router_logits, routing.bias
    deepseek = routing.method == "deepseek_v3"
    if bias is None and routing.method in _READ_A_BIAS:
        bias = torch.zeros(logits.shape[1], dtype=torch.float32, device=logits.device)
    return {
        "routing_logits": (logits if logits.dtype in LOGITS_DTYPES else logits.float()).contiguous(),
        "routing_bias": None if bias is None else bias.contiguous(),
        "top_k": routing.top_k,
        "n_group": routing.n_group if grouped else 1 if ones else None,
        "topk_group": routing.topk_group if grouped else 1 if ones else None,
        "routed_scaling_factor": float(routing.scaling_factor) if deepseek else None,
        "routing_method_type": package.number("RoutingMethodType", METHODS[routing.method]),
    }


def given_arguments(entry: package.Entry, ids: Tensor, weights: Tensor, num_experts: int) -> dict[str, Any]:
    """The arguments of a routed function.

    Ids outside [0, num_experts) become -1: the kernels skip foreign experts but count those inside that range.
    """
    safe = ids.masked_fill((ids < 0) | (ids >= num_experts), -1)
    return {
        "topk_ids": (safe, weights) if entry.accepts_pairs else pack(safe, weights),
        "top_k": ids.shape[1],
        "n_group": None,
        "topk_group": None,
        "routed_scaling_factor": None,
        # The kernels ignore it here, but launchers check options that belong to other methods.
        "routing_method_type": package.number("RoutingMethodType", "Renormalize"),
    }


def pack(ids: Tensor, weights: Tensor) -> Tensor:
    """int32: the id in the high half, the bits of the weight as bfloat16 in the low half.

    The mask keeps the sign of a negative weight from running into the id.
    """
    bits = weights.to(torch.bfloat16).view(torch.int16).to(torch.int32) & 0xFFFF
    return (ids << 16) | bits
