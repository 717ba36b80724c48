"""prepare: from raw weights to a backend's layout. See restoring.py for the way back, explaining.py for the why."""

from __future__ import annotations

import dataclasses
import json
import math
import urllib.parse
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.backends import Backend, Problem
from torch_moe_ops.backends.explain import requested_backend, select
from torch_moe_ops.backends.slow import warn_of_reference
from torch_moe_ops.core.activations import ACTIVATIONS, resolve_constants
from torch_moe_ops.core.schemes import SCHEMES, get_scheme
from torch_moe_ops.prepared.kept_problem import device_fields, to_text
from torch_moe_ops.prepared.prepared_weights import PreparedWeights
from torch_moe_ops.weights.integer_storage import int4_scales_of
from torch_moe_ops.weights.raw_weights import RawWeights

KEPT = ("w13_scale_2", "w2_scale_2", "a13_input_scale", "a2_input_scale")
PLAIN_FIELDS = ("activation", "swiglu_alpha", "swiglu_beta", "swiglu_limit", "source")


@torch.no_grad()
def prepare(
    raw: RawWeights,
    activation: str | None = None,
    act_format: str | None = None,
    backend: str = "auto",
    device: torch.device | str | None = None,
    num_experts: int | None = None,
    local_expert_offset: int = 0,
    parallel: Any = None,
    swiglu_alpha: float | None = None,
    swiglu_beta: float | None = None,
    swiglu_limit: float | None = None,
    router_weight_on_input: bool = False,
    weight_policy: str = "exact",
) -> PreparedWeights:
    """Choose a backend for a layer and bring its weights into that backend's layout. Once per layer.

    Args:
        raw: the layer's experts. Not modified, and no memory is shared with them.
        activation: a name of `activations.ACTIVATIONS`; None: what the checkpoint says, else "silu".
        act_format: how GEMM operands are made from activations; None: the scheme's default
            ("nvfp4" for nvfp4, "none" for unquantized weights). Never chosen by device.
        backend: "auto" takes MOEQ_BACKEND, else the first backend that fits; a name forces it.
        device: where the prepared weights live; None: raw's own device.
        num_experts, local_expert_offset: for expert parallelism, when `raw` holds only the experts
            [local_expert_offset, + raw.num_experts) of num_experts. None: just as many as are needed.
        parallel: a FusedMoEParallelConfig, when `raw` holds all experts: this rank's share is taken.
        swiglu_alpha, swiglu_beta, swiglu_limit: None: what the checkpoint says, else the activation's own.
        router_weight_on_input: top-1 models whose routing weight multiplies the token (routed op only;
            the monolithic op does it for routing method "llama4").
        weight_policy: "exact"; "packed" or "folded" for nvfp4 weights with act_format "fp8": each
            weight is rounded once to e4m3 under a power of two per row (docs/numerics.md).

    Warns, once for a device and a reason, where "auto" has nothing but `reference`, which is slow.

    Raises:
        ValueError: an argument does not fit, or no backend (or not the forced one) can run the
            problem; the message then holds the whole `explain` table.
    """
    target = torch.device(device) if device is not None else raw.device
    if parallel is not None:
        raw, num_experts, local_expert_offset = share_of(raw, parallel, num_experts, local_expert_offset)
    settings = settings_of(
        raw,
        activation=activation,
        act_format=act_format,
        num_experts=num_experts,
        local_expert_offset=local_expert_offset,
        swiglu=(swiglu_alpha, swiglu_beta, swiglu_limit),
        router_weight_on_input=router_weight_on_input,
        weight_policy=weight_policy,
    )
    problem, requested = problem_of(raw, settings, target), requested_backend(backend)
    chosen = select(problem, requested)
    if requested == "auto" and chosen.name == "reference":
        warn_of_reference(problem, stacklevel=3)  # of the caller, beyond no_grad's wrapper
    return PreparedWeights(
        backend=chosen.name,
        layout=chosen.layout.name,
        raw=plain_values(raw),
        posed=to_text(problem, requested),
        **settings,
        **tensors_of(raw, chosen, settings, target),
    )


def share_of(raw: RawWeights, parallel: Any, num_experts: int | None, offset: int) -> tuple[RawWeights, int, int]:
    from torch_moe_ops.weights.sharding import shard

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
    # Constants without an activation (a quant config has none) are for the one that is named here.
    said = (raw.swiglu_alpha, raw.swiglu_beta, raw.swiglu_limit)
    said = said if raw.activation in (None, name) else (None, None, None)
    alpha, beta, limit = (given if given is not None else own for given, own in zip(swiglu, said, strict=True))
    resolve_constants(name, alpha, beta, limit)  # raises where the activation takes no such constant
    return {
        "scheme": scheme.name,
        "activation": name,
        "act_format": act,
        "weight_policy": weight_policy,
        "num_experts": total,
        "num_local_experts": raw.num_experts,
        "local_expert_offset": local_expert_offset,
        "hidden_size": raw.hidden_size,
        "intermediate_size": raw.intermediate_size,
        "router_weight_on_input": router_weight_on_input,
        "swiglu_alpha": alpha,
        "swiglu_beta": beta,
        "swiglu_limit": limit,
    }


def problem_of(raw: RawWeights, settings: Mapping[str, Any], device: torch.device) -> Problem:
    """The problem that a layer poses on a device."""
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
    )
    shared += ("local_expert_offset", "hidden_size", "intermediate_size", "router_weight_on_input")
    return Problem(
        **{name: settings[name] for name in shared},
        **device_fields(device),
        dtype=raw.w13.dtype if raw.scheme == "none" else None,
        has_bias=raw.w13_bias is not None or raw.w2_bias is not None,
        per_half_alphas=raw.w13_scale_2 is not None and raw.w13_scale_2.shape[1] == 2,
        input_scale=kind,
        constants=constants_of(settings),
        weight_scales=(
            int4_scales_of(raw) if raw.scheme == "int4" else weight_scales_of(raw.scheme, raw.w13_scale, raw.w2_scale)
        ),
    )


def constants_of(settings: Mapping[str, Any]) -> tuple[float, float, float] | None:
    given = (settings[f"swiglu_{name}"] for name in ("alpha", "beta", "limit"))
    constants = resolve_constants(settings["activation"], *given)
    return None if constants == (1.0, 0.0, math.inf) else constants


def weight_scales_of(scheme: str, *scales: Tensor | None) -> str | None:
    """What shares a scale of fp8 weights: "tensor", "half" (of w13) or "channel"; of int8: "channel" or "group".

    None for other schemes.
    """
    if scheme == "int8":
        return "group" if any(s is not None and s.shape[-1] > 1 for s in scales) else "channel"
    if scheme != "fp8":
        return None
    if any(s is None or s.ndim != 2 for s in scales):
        return "channel"
    return "tensor" if all(s is not None and s.shape[1] == 1 for s in scales) else "half"


def tensors_of(raw: RawWeights, backend: Backend, settings: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Every tensor of PreparedWeights, contiguous and on `device`."""
    tensors = {name: getattr(raw, name) for name in KEPT if getattr(raw, name) is not None}
    scaled = raw
    if backend.one_input_scale and raw.a13_input_scale is not None:
        scaled = dataclasses.replace(raw, a13_input_scale=raw.a13_input_scale.max())
    tensors |= _scalars(scaled, static=settings["act_format"] in SCHEMES[raw.scheme].static_acts)
    tensors |= backend.prepare(raw)
    padded = backend.layout.intermediate_size(SCHEMES[raw.scheme], tuple(tensors["w2"].shape))
    if raw.w13_bias is not None:
        halves = raw.w13_bias.float().unflatten(1, (-1, raw.intermediate_size))
        extra = padded - raw.intermediate_size
        tensors["w13_bias"] = torch.nn.functional.pad(halves, (0, extra)).flatten(1)
    if raw.w2_bias is not None:
        tensors["w2_bias"] = raw.w2_bias.float()
    if backend.bias_layout is not None:
        for name in tensors.keys() & {"w13_bias", "w2_bias"}:
            halves = 2 if name == "w13_bias" and raw.is_gated else 1
            tensors[name] = backend.bias_layout.arrange(name, tensors[name], halves)
    moved = {name: tensor.detach().to(device).contiguous() for name, tensor in tensors.items()}
    return own_memory(moved, raw.tensors())  # `update_` writes into it


def own_memory(tensors: dict[str, Tensor], others: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, those copied that share a storage with one of `others`."""
    taken = {_storage(t) for t in others.values()}
    return {name: t.clone() if _storage(t) in taken else t for name, t in tensors.items()}


def _storage(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _scalars(raw: RawWeights, static: bool) -> dict[str, Tensor]:
    """Alphas and gscales.

    static: the activation format takes calibrated scales. Then gscale = fl(1 / input_scale), and
    alpha = fl(input_scale * scale_2) where the scheme has alphas; a kernel of a scheme that has none
    multiplies by fl(1 / gscale) itself.
    """
    tensors: dict[str, Tensor] = {}
    pairs = (
        ("1", raw.w13_scale_2, raw.a13_input_scale if static else None),
        ("2", raw.w2_scale_2, raw.a2_input_scale if static else None),
    )
    for gemm, scale_2, input_scale in pairs:
        if input_scale is not None:
            tensors[f"a{gemm}_gscale"] = input_scale.reciprocal()
        if scale_2 is None:
            continue
        alphas = scale_2.squeeze(1) if scale_2.ndim == 2 and scale_2.shape[1] == 1 else scale_2
        if input_scale is not None:
            alphas = (input_scale[:, None] if input_scale.ndim and alphas.ndim == 2 else input_scale) * alphas
        tensors[f"g{gemm}_alphas"] = alphas
    return tensors


def plain_values(raw: RawWeights) -> str:
    plain = {name: getattr(raw, name) for name in PLAIN_FIELDS}
    for name in ("w13_bias", "w2_bias"):
        bias = getattr(raw, name)
        plain[f"{name}_dtype"] = None if bias is None else str(bias.dtype).removeprefix("torch.")
    # Quoted: torch.export writes string inputs into source code without escaping them.
    return urllib.parse.quote(json.dumps(plain))
