"""The routing methods as data, and the rules on what may be asked of them.

The rules return a problem (argument, requirement, got) instead of raising, because `Routing` and
`moeq::route` report the same mistake as different exceptions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

MAX_EXPERTS = 2048
MAX_TOP_K = 32
LOGIT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class RoutingMethodType(IntEnum):
    """The field's routing methods.

    0..5 mean the same in every version of vLLM and FlashInfer. All others are private to this
    library (>= 100): adapters translate by name and never pass a number on.
    """

    Default = 0
    Renormalize = 1
    DeepSeekV3 = 2
    Llama4 = 3
    RenormalizeNaive = 4
    TopK = 5
    DeepseekV4 = 100
    Custom = 101
    Simulated = 102
    SigmoidRenorm = 103
    MiniMax2 = 104
    Sigmoid = 105
    TopKSigmoid = 106
    Unspecified = 199


@dataclass(frozen=True)
class RoutingMethod:
    """What one method computes and which options of `route` it can use."""

    name: str
    type: RoutingMethodType
    score: str  # key of SCORES (routing/reference.py), applied to all logits; experts are chosen by it (plus the bias)
    weight: str = (
        ""  # key of SCORES (routing/reference.py), applied to the chosen logits; "": the chosen scores themselves
    )
    renormalizes: bool = False  # divides the weights by their sum, unless told otherwise
    can_choose_renormalize: bool = False
    takes_bias: bool = False
    takes_groups: bool = False
    takes_scaling_factor: bool = False
    max_top_k: int = MAX_TOP_K


def _table(*methods: RoutingMethod) -> dict[str, RoutingMethod]:
    return {m.name: m for m in methods}


_Type = RoutingMethodType
METHODS: dict[str, RoutingMethod] = _table(
    # `default` with groups, and with a scaling factor, is DeepSeek-V2's router.
    RoutingMethod(
        "default",
        _Type.Default,
        "softmax",
        can_choose_renormalize=True,
        takes_groups=True,
        takes_scaling_factor=True,
    ),
    RoutingMethod("renormalize", _Type.Renormalize, "identity", weight="softmax", takes_groups=True),
    RoutingMethod(
        "deepseek_v3",
        _Type.DeepSeekV3,
        "sigmoid",
        renormalizes=True,
        can_choose_renormalize=True,
        takes_bias=True,
        takes_groups=True,
        takes_scaling_factor=True,
    ),
    RoutingMethod("llama4", _Type.Llama4, "identity", weight="sigmoid", max_top_k=1),
    RoutingMethod(
        "renormalize_naive",
        _Type.RenormalizeNaive,
        "softmax",
        renormalizes=True,
        can_choose_renormalize=True,
        takes_groups=True,
    ),
    RoutingMethod("topk", _Type.TopK, "identity"),
    RoutingMethod("sigmoid_renorm", _Type.SigmoidRenorm, "sigmoid", renormalizes=True, can_choose_renormalize=True),
    RoutingMethod(
        "minimax2",
        _Type.MiniMax2,
        "sigmoid",
        renormalizes=True,
        can_choose_renormalize=True,
        takes_bias=True,
        takes_scaling_factor=True,
    ),
    RoutingMethod("sigmoid", _Type.Sigmoid, "sigmoid", can_choose_renormalize=True),
    RoutingMethod("topk_sigmoid", _Type.TopKSigmoid, "identity", weight="sigmoid"),
    RoutingMethod(
        "deepseek_v4",
        _Type.DeepseekV4,
        "sqrtsoftplus",
        renormalizes=True,
        can_choose_renormalize=True,
        takes_bias=True,
        takes_scaling_factor=True,
    ),
)
ROUTING_METHODS: tuple[str, ...] = tuple(METHODS)
METHOD_TYPES: dict[str, RoutingMethodType] = {name: m.type for name, m in METHODS.items()}
METHOD_NAMES: dict[RoutingMethodType, str] = {m.type: name for name, m in METHODS.items()}

Problem = tuple[str, str, Any]  # argument, requirement, got


def logits_problem(router_logits: Tensor) -> Problem | None:
    if router_logits.dtype not in LOGIT_DTYPES:
        return "router_logits", f"have dtype in {[str(d) for d in LOGIT_DTYPES]}", router_logits.dtype
    if router_logits.dim() != 2:
        return "router_logits", "have shape [num_tokens, num_experts]", router_logits.shape
    return None


def bias_problem(bias: Tensor, router_logits: Tensor | None) -> Problem | None:
    # Never cast: a bias rounded to bf16 changes the selection.
    if bias.dtype != torch.float32:
        return "routing_bias", "have dtype torch.float32", bias.dtype
    if bias.dim() != 1 or (router_logits is not None and bias.shape[0] != router_logits.shape[1]):
        size = "num_experts" if router_logits is None else f"num_experts (={router_logits.shape[1]})"
        return "routing_bias", f"have shape [{size}]", bias.shape
    return None


def option_problem(method_name: str, top_k: int, n_group: int, topk_group: int, bias: Tensor | None) -> Problem | None:
    """The rules that need no number of experts."""
    method = METHODS.get(method_name)
    if method is None:
        return "routing_method", f"be one of {list(METHODS)}", method_name
    if not 1 <= top_k <= MAX_TOP_K:
        return "top_k", f"be in [1, {MAX_TOP_K}]", top_k
    if top_k > method.max_top_k:
        return "top_k", f"be {method.max_top_k} for {method_name!r}", top_k
    if bias is not None and not method.takes_bias:
        return "routing_bias", _unless("be None", method, "takes_bias"), bias.shape
    if n_group < 0:
        return "n_group", "be at least 0", n_group
    if n_group > 1 and not method.takes_groups:
        return "n_group", _unless("be 0 or 1", method, "takes_groups"), n_group
    lowest = 1 if n_group > 1 else 0
    if not lowest <= topk_group <= max(n_group, 1):
        return "topk_group", f"be in [{lowest}, {max(n_group, 1)}] with n_group={n_group}", topk_group
    return None


def weight_option_problem(method_name: str, factor: float, renormalize: bool | None) -> Problem | None:
    method = METHODS[method_name]
    if not math.isfinite(factor):
        return "routed_scaling_factor", "be finite", factor
    if abs(factor) > 3.4028234663852886e38:  # no global: torch.compile would make a symbol of it
        return "routed_scaling_factor", "be at most 3.4e38 in magnitude, the range of float32", factor
    if factor != 1.0 and not method.takes_scaling_factor:
        return "routed_scaling_factor", _unless("be 1.0", method, "takes_scaling_factor"), factor
    # Saying what the method does anyway is harmless; `renormalize`'s softmax makes a sum of 1.
    own = method.renormalizes or method.weight == "softmax"
    if renormalize is not None and renormalize != own and not method.can_choose_renormalize:
        return "renormalize", _unless(f"be None or {own}", method, "can_choose_renormalize"), renormalize
    return None


def size_problem(num_experts: int, top_k: int, n_group: int, topk_group: int, has_bias: bool) -> Problem | None:
    if not 1 <= num_experts <= MAX_EXPERTS:
        return "num_experts", f"be in [1, {MAX_EXPERTS}]", num_experts
    if top_k > num_experts:
        return "top_k", f"be in [1, {min(MAX_TOP_K, num_experts)}]", top_k
    if n_group <= 1:
        return None
    if num_experts % n_group:
        return "n_group", f"divide num_experts (={num_experts})", n_group
    group_size = num_experts // n_group
    if has_bias and group_size < 2:
        return "n_group", "leave at least 2 experts per group, whose two best make its score", n_group
    if top_k > topk_group * group_size:
        return "top_k", f"be at most {topk_group * group_size}, the experts in topk_group groups", top_k
    return None


def shared_problem(method_name: str, top_k: int, num_shared_experts: int, weights: Tensor | None) -> Problem | None:
    """What is wrong with experts that every token goes to, beside those that are chosen."""
    method, most = METHODS[method_name], MAX_TOP_K - top_k
    if not 0 <= num_shared_experts <= most:
        return "num_shared_experts", f"be in [0, {most}] with top_k={top_k}", num_shared_experts
    if num_shared_experts and method.max_top_k == 1:  # its weight goes on the input, of which there is one
        return "num_shared_experts", f"be 0 for {method_name!r}", num_shared_experts
    if weights is None:
        return None
    if not num_shared_experts:
        return "shared_expert_weights", "be None unless num_shared_experts is at least 1", weights.shape
    if weights.dtype not in LOGIT_DTYPES:
        return "shared_expert_weights", f"have dtype in {[str(d) for d in LOGIT_DTYPES]}", weights.dtype
    if weights.dim() != 2 or weights.shape[1] != num_shared_experts:
        return "shared_expert_weights", f"have shape [num_tokens, {num_shared_experts}]", weights.shape
    return None


def _unless(requirement: str, method: RoutingMethod, capability: str) -> str:
    """The requirement on an option that `method` cannot use, and which methods can."""
    users = [m.name for m in METHODS.values() if getattr(m, capability)]
    return f"{requirement} for {method.name!r} (an option of {', '.join(users)})"


def get_routing_method_type(
    scoring_func: str,
    top_k: int,
    renormalize: bool,
    num_expert_group: int | None,
    has_e_score_bias: bool,
    *,
    routed_scaling_factor: float | None = None,
    weight_on_input: bool = False,
) -> RoutingMethodType:
    """The method that a model's router settings mean, in vLLM's terms.

    Args:
        scoring_func: "softmax", "sigmoid" or "sqrtsoftplus"; anything else is Unspecified.
        num_expert_group: 0 or None for no groups.
        routed_scaling_factor: does not change the answer, because `route` applies any factor to the
            methods with a bias; accepted so that later vLLM's call works.
        weight_on_input: whether the model multiplies the expert's input by the weight (Llama 4).

    Unspecified means that no method is right: route in torch and call the routed op.
    """
    has_groups = num_expert_group is not None and num_expert_group > 0
    kind = RoutingMethodType
    if scoring_func == "sqrtsoftplus":
        # Without renormalisation this is an option of `route`, not what other kernels call DeepSeek-V4.
        return kind.DeepseekV4 if renormalize and not _is_split(num_expert_group) else kind.Unspecified
    if has_e_score_bias:
        if scoring_func != "sigmoid" or not renormalize:
            return kind.Unspecified
        return kind.DeepSeekV3 if has_groups else kind.MiniMax2
    if scoring_func == "sigmoid":
        if _is_split(num_expert_group):
            return kind.Unspecified
        if top_k == 1 and weight_on_input and not renormalize:
            return kind.Llama4
        return kind.SigmoidRenorm if renormalize else kind.Sigmoid
    if scoring_func == "softmax":
        return kind.Renormalize if renormalize else kind.Default
    return kind.Unspecified


def _is_split(num_expert_group: int | None) -> bool:
    """Whether groups restrict the choice at all: a single group does not."""
    return num_expert_group is not None and num_expert_group > 1
