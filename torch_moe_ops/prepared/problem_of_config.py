"""From the configs of a layer to the Problem that backends look at."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_moe_ops.config._require import require_type
from torch_moe_ops.config.builders import FUSED_MOE_UNQUANTIZED_CONFIG
from torch_moe_ops.config.moe import FusedMoEConfig
from torch_moe_ops.config.quant_config import FusedMoEQuantConfig
from torch_moe_ops.config.queries import scheme_name
from torch_moe_ops.core.activations import ACTIVATIONS, resolve_constants
from torch_moe_ops.core.problem import STANDARD, Problem
from torch_moe_ops.core.routing_methods import METHOD_NAMES, RoutingMethodType
from torch_moe_ops.core.schemes import SCHEMES, Scheme
from torch_moe_ops.weights.shared_scales import int4_scales

OWNER = "explain"


def problem_of_config(
    config: FusedMoEConfig,
    quant_config: FusedMoEQuantConfig | None = None,
    capability: tuple[int, int] | None = None,
    accuracy: str = STANDARD,
) -> Problem:
    """The problem that a layer poses, from its configs alone.

    Args:
        config: sizes, activation, routing, placement, device.
        quant_config: formats and scales; checked against the sizes. None: nothing is quantized.
        capability: of the CUDA device; None: that of the device in this machine, if it has one.
        accuracy: as in `prepare`.

    Raises ValueError where a tensor of quant_config does not fit config.
    """
    require_type(isinstance(config, FusedMoEConfig), OWNER, "config", "be a FusedMoEConfig", config)
    if quant_config is None:
        quant = FUSED_MOE_UNQUANTIZED_CONFIG
    else:
        quant = quant_config
        require_type(isinstance(quant, FusedMoEQuantConfig), OWNER, "quant_config", "be a FusedMoEQuantConfig", quant)
        config.validate_quant_config(quant)
    scheme, device = SCHEMES[scheme_name(quant)], torch.device(config.device)
    if capability is None and device.type == "cuda" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(device)
    return Problem(
        scheme=scheme.name,
        act_format=quant.act_format,
        activation=config.activation,
        device=device.type,
        capability=capability,
        num_experts=config.num_experts,
        num_local_experts=config.num_local_experts,
        local_expert_offset=config.local_expert_offset,
        hidden_size=config.hidden_dim,
        intermediate_size=config.intermediate_size_per_partition,
        top_k=config.experts_per_token,
        dtype=config.in_dtype,
        routing_method=METHOD_NAMES.get(config.routing_method),
        # The monolithic op puts this method's weights on the input.
        router_weight_on_input=config.routing_method == RoutingMethodType.Llama4,
        has_bias=config.has_bias,
        per_half_alphas=_has_per_half_alphas(quant, scheme),
        input_scale=_input_scale_kind(quant),
        constants=_constants(config, quant),
        weight_scales=_int4_scales(config, quant) if scheme.name == "int4" else _weight_scales(quant, scheme.name),
        accuracy=accuracy,
    )


def _has_per_half_alphas(config: FusedMoEQuantConfig, scheme: Scheme) -> bool:
    alphas = config.g1_alphas
    return scheme.has_scale_2 and alphas is not None and alphas.ndim == 2 and alphas.shape[1] == 2


def _input_scale_kind(config: FusedMoEQuantConfig) -> str:
    given = [t for d in (config._a1, config._a2) for t in (d.scale, d.gscale) if isinstance(t, Tensor)]
    return "none" if not given else "expert" if any(t.ndim == 1 and t.numel() > 1 for t in given) else "tensor"


def _constants(config: FusedMoEConfig, quant: FusedMoEQuantConfig) -> tuple[float, float, float] | None:
    given = (quant.gemm1_alpha, quant.gemm1_beta, quant.gemm1_clamp_limit)
    constants = resolve_constants(config.activation, *given)
    return None if constants == (1.0, 0.0, math.inf) else constants


def _weight_scales(config: FusedMoEQuantConfig, scheme: str) -> str | None:
    """What shares a scale of fp8 weights: a matrix, a half of w13, or else a row; of int8 as `weight_scales_of` says.

    None: not known, or another scheme.
    """
    if scheme not in ("fp8", "int8"):
        return None
    scales = [d.scale if d.scale is not None else d.alpha for d in (config._w1, config._w2)]
    if scheme == "int8":
        shares = "group" if any(s is not None and s.ndim == 3 and min(s.shape[1:]) > 1 for s in scales) else "channel"
        return shares + (" with zero points" if any(d.zp is not None for d in (config._w1, config._w2)) else "")
    counts = [s.numel() // s.shape[0] for s in scales if s is not None]
    return None if not counts else {1: "tensor", 2: "half"}.get(max(counts), "channel")


def _int4_scales(config: FusedMoEConfig, quant: FusedMoEQuantConfig) -> str | None:
    """As `int4_scales_of` says it of the weights. None: not known."""
    hidden, inter = config.hidden_dim, config.intermediate_size_per_partition
    rows = (2 if ACTIVATIONS[config.activation].is_gated else 1) * inter
    kinds = []
    for desc, n, k in ((quant._w1, rows, hidden), (quant._w2, hidden, inter)):
        scale = desc.scale
        if not isinstance(scale, Tensor):
            return None
        groups = scale[0].numel() // n if scale.ndim == 3 else 1
        # Scales in e4m3, and those of groups times one of the row, become float32.
        wide = desc.channel_scale is not None or scale.element_size() == 1
        kinds.append(int4_scales(torch.float32 if wide else scale.dtype, k, groups, desc.zp is not None))
    return ", ".join(dict.fromkeys(kinds))
