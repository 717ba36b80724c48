"""From raw weights and what a caller asks for to the problem that a layer poses."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Mapping
from typing import Any

import torch

from torch_moe_ops.core.activations import ACTIVATIONS, resolve_constants
from torch_moe_ops.core.problem import Problem
from torch_moe_ops.core.schemes import SCHEMES, get_scheme
from torch_moe_ops.weights.raw_weights import RawWeights
from torch_moe_ops.weights.sharding import shard
from torch_moe_ops.weights.shared_scales import int4_scales_of, weight_scales_of


def share_of(raw: RawWeights, parallel: Any, num_experts: int | None, offset: int) -> tuple[RawWeights, int, int]:
    if num_experts is not None or offset:
        raise ValueError("prepare: num_experts and local_expert_offset must be left out where parallel is given")
    return shard(raw, parallel)


def settings_of(
    raw: RawWeights,
    *,
    activation: str | None,
    act_format: str | None,
    num_experts: int | None,
    local_expert_offset: int,
    swiglu: tuple[float | None, float | None, float | None],
    router_weight_on_input: bool,
    weight_policy: str,
) -> dict[str, Any]:
    """The plain fields of PreparedWeights, validated."""
    local_expert_offset = _whole("local_expert_offset", local_expert_offset)
    num_experts = None if num_experts is None else _whole("num_experts", num_experts)
    for constant, value in zip(("alpha", "beta", "limit"), swiglu, strict=True):
        if value is not None and not isinstance(value, numbers.Real):
            raise TypeError(f"prepare: swiglu_{constant} must be a number, got {type(value).__name__}")
    scheme = get_scheme(raw.scheme)
    name = activation or raw.activation or ("silu" if raw.is_gated else "silu_no_mul")
    if name not in ACTIVATIONS:
        raise ValueError(f"prepare: activation must be one of {sorted(ACTIVATIONS)}, got {name!r}")
    if ACTIVATIONS[name].is_gated != raw.is_gated:
        need = "gate and up rows" if ACTIVATIONS[name].is_gated else "only up rows"
        raise ValueError(f"prepare: activation {name!r} needs w13 with {need}, got w13 {tuple(raw.w13.shape)}")
    act = act_format or scheme.act_formats[0]
    if act not in scheme.act_formats:
        raise ValueError(f"prepare: act_format must be one of {list(scheme.act_formats)}, got {act!r}")
    policies = scheme.policies if act == "fp8" else ("exact",)
    if weight_policy not in policies:
        what = f"for scheme {scheme.name!r} and act_format {act!r}"
        raise ValueError(f"prepare: weight_policy must be one of {list(policies)} {what}, got {weight_policy!r}")
    if local_expert_offset < 0:
        raise ValueError(f"prepare: local_expert_offset must be at least 0, got {local_expert_offset}")
    needed = local_expert_offset + raw.num_experts
    total = needed if num_experts is None else num_experts
    if total < needed:
        raise ValueError(f"prepare: num_experts must be at least {needed} (offset + local experts), got {total}")
    if router_weight_on_input and raw.num_shared_experts:
        text = "be False where there are shared experts: a token's input has one weight for all of its experts"
        raise ValueError(f"prepare: router_weight_on_input must {text}, got True")
    # Constants without an activation (a quant config has none) are for the one that is named here.
    said = (raw.swiglu_alpha, raw.swiglu_beta, raw.swiglu_limit)
    said = said if raw.activation in (None, name) else (None, None, None)
    alpha, beta, limit = (own if given is None else float(given) for given, own in zip(swiglu, said, strict=True))
    resolve_constants(name, alpha, beta, limit)  # raises where the activation takes no such constant
    return {
        "scheme": scheme.name,
        "activation": name,
        "act_format": act,
        "weight_policy": weight_policy,
        "num_experts": total,
        "num_local_experts": raw.num_experts,
        "num_shared_experts": raw.num_shared_experts,
        "local_expert_offset": local_expert_offset,
        "hidden_size": raw.hidden_size,
        "intermediate_size": raw.intermediate_size,
        "router_weight_on_input": router_weight_on_input,
        "swiglu_alpha": alpha,
        "swiglu_beta": beta,
        "swiglu_limit": limit,
    }


def _whole(name: str, value: Any) -> int:
    """TypeError where a number of experts is none."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"prepare: {name} must be an int, got {type(value).__name__}")
    return operator.index(value)


def problem_of(
    raw: RawWeights,
    settings: Mapping[str, Any],
    device: torch.device,
    accuracy: str,
    dtype: torch.dtype | None = None,
) -> Problem:
    """The problem that a layer poses on a device, to be solved as accurately as is said.

    dtype: of the hidden states, where it is known; that of unquantized experts is.
    """
    static = settings["act_format"] in SCHEMES[raw.scheme].static_acts
    scales = [s for s in (raw.a13_input_scale, raw.a2_input_scale) if s is not None and static]
    kind = "none" if not scales else "expert" if any(s.ndim for s in scales) else "tensor"
    shared: tuple[str, ...] = (
        "scheme",
        "activation",
        "act_format",
        "weight_policy",
        "num_experts",
        "num_local_experts",
        "num_shared_experts",
    )
    shared += ("local_expert_offset", "hidden_size", "intermediate_size", "router_weight_on_input")
    return Problem(
        **{name: settings[name] for name in shared},
        **device_fields(device),
        dtype=raw.w13.dtype if raw.scheme == "none" else dtype,
        has_bias=raw.w13_bias is not None or raw.w2_bias is not None,
        per_half_alphas=raw.w13_scale_2 is not None and raw.w13_scale_2.shape[1] == 2,
        input_scale=kind,
        constants=constants_of(settings),
        weight_scales=(
            int4_scales_of(raw)
            if raw.scheme == "int4"
            else weight_scales_of(
                raw.scheme, raw.w13_scale, raw.w2_scale, zero_points=(raw.w13_zero_point, raw.w2_zero_point)
            )
        ),
        accuracy=accuracy,
    )


def constants_of(settings: Mapping[str, Any]) -> tuple[float, float, float] | None:
    given = (settings[f"swiglu_{name}"] for name in ("alpha", "beta", "limit"))
    constants = resolve_constants(settings["activation"], *given)
    return None if constants == (1.0, 0.0, math.inf) else constants


def device_fields(device: torch.device) -> dict[str, Any]:
    """`device` and `capability` of a Problem."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return {"device": device.type, "capability": capability}
