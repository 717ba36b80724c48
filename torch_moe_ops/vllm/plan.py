"""Whether a layer runs here. Decided before its weights are loaded: later, vLLM's own method could not take over."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.backends.explain import Explanation
from torch_moe_ops.backends.native import auto_act_format
from torch_moe_ops.core.routing_methods import MAX_TOP_K
from torch_moe_ops.prepared.explaining import explain
from torch_moe_ops.vllm import settings
from torch_moe_ops.vllm.activation import activation_of
from torch_moe_ops.vllm.adapters import check_lora
from torch_moe_ops.vllm.formats import ExpertFormat
from torch_moe_ops.vllm.parameters import LayerSizes
from torch_moe_ops.vllm.placement import first_of_range
from torch_moe_ops.weights.raw_weights import RawWeights
from torch_moe_ops.weights.shared_experts import with_shared_experts


@dataclass(frozen=True)
class Plan:
    """How a layer runs.

    backend: what `prepare` will choose. options: keywords of `prepare`. maps_ids: the experts of this rank are no
    range of ids, so that each call maps them to places. exchanges: vLLM's modular kernel takes tokens from rank to rank
    around the experts.
    """

    format: ExpertFormat
    backend: str
    act_format: str
    maps_ids: bool
    exchanges: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def options_of_all(self) -> dict[str, Any]:
        """Keywords of `prepare` for a rank that has all experts, whatever their number."""
        return {n: value for n, value in self.options.items() if n not in ("num_experts", "local_expert_offset")}


def plan_layer(layer: Any, format: ExpertFormat, device: torch.device) -> Plan:
    """The plan of a layer that is being made.

    Args:
        layer: vLLM's RoutedExperts, before it has weights.
        device: where its weights will be.

    Raises ValueError saying what the layer must be, where it is left to vLLM.
    """
    _check_deployment(layer, format)
    config = layer.moe_config
    sizes = LayerSizes(
        experts=config.num_local_experts,
        hidden=config.hidden_dim,
        intermediate=config.intermediate_size_per_partition,
        halves=2 if config.is_act_and_mul else 1,
        has_bias=config.has_bias,
        dtype=layer.params_dtype,
    )
    _check_shards(sizes, format, config)
    offset = first_of_range(layer._expert_map)
    exchanges = _exchanges(config.moe_parallel_config)
    options = {**activation_of(layer), "router_weight_on_input": bool(layer.apply_router_weight_on_input)}
    options["accuracy"] = settings.accuracy()
    if options["activation"] == "swigluoai" and _is_interleaved(layer) != format.interleaved:
        raise ValueError(f"rows of w13 must be gates before ups in {format.name}, got them interleaved")
    if options["router_weight_on_input"] and config.experts_per_token != 1:
        raise ValueError(f"top_k must be 1 for router weights on the input, got {config.experts_per_token}")
    options["router_weight_on_input"] &= not exchanges  # who sends a token has multiplied it
    if offset is not None:
        options |= {"num_experts": config.num_experts, "local_expert_offset": offset}
    stored = format.act_format if settings.act_format() != "none" else "none"
    explanation = _explain(format, sizes, stored, device, options)
    act = stored
    if settings.act_format() == "auto":
        act = auto_act_format(explanation.problem, explanation.requested)
        explanation = _explain(format, sizes, act, device, options)
    backend = _chosen(explanation)
    _check_dtype(backend, config.in_dtype)
    return Plan(format, backend, act, offset is None, exchanges, {**options, "act_format": act})


def check_with_shared(plan: Plan, top_k: int, sizes: LayerSizes, shared: LayerSizes, device: torch.device) -> None:
    """Raises ValueError where the planned backend does not run a layer together with its shared experts.

    Args:
        top_k: of the router.
        sizes, shared: of the routed experts, and of the shared ones as one expert.
    """
    raw = with_shared_experts(*(_without_data(plan.format, s, plan.act_format) for s in (sizes, shared)))
    if top_k + raw.num_shared_experts > MAX_TOP_K:
        columns = f"{top_k} and {raw.num_shared_experts}"
        raise ValueError(
            f"top_k and shared experts of the routed ones' width must be at most {MAX_TOP_K}, got {columns}"
        )
    found = explain(raw, device=device, **plan.options_of_all())
    if found.chosen != plan.backend:
        raise ValueError(f"backend {plan.backend} must run the layer with its shared experts, got {found.chosen}")


def _explain(
    format: ExpertFormat, sizes: LayerSizes, act: str, device: torch.device, options: dict[str, Any]
) -> Explanation:
    return explain(_without_data(format, sizes, act), act_format=act, device=device, **options)


def _without_data(format: ExpertFormat, sizes: LayerSizes, act: str) -> RawWeights:
    """Weights that have shapes only."""
    tensors = {name: p.empty("meta") for name, p in format.parameters(sizes).items()}
    return format.raw(tensors, act, format.name)


def _chosen(explanation: Explanation) -> str:
    reasons = "; ".join(f"{name}: {why[0]}" for name, why in explanation.against.items() if why)
    if explanation.chosen is None:
        raise ValueError(f"a backend must run {explanation.problem}, got none ({reasons})")
    if explanation.chosen == "reference" and explanation.requested != "reference":
        raise ValueError(f"a backend besides the slow `reference` must run the layer, got none ({reasons})")
    return explanation.chosen


def _check_dtype(backend: str, dtype: torch.dtype) -> None:
    known = BACKENDS[backend].hidden_dtypes
    if dtype not in known:
        raise ValueError(f"hidden states must be one of {[str(d) for d in known]} for backend {backend}, got {dtype}")


def _is_interleaved(layer: Any) -> bool:
    return getattr(layer.activation, "value", layer.activation) == "swigluoai"


def _check_deployment(layer: Any, format: ExpertFormat) -> None:
    """What vLLM does with its own methods' weights, and cannot do with ours."""
    config = layer.moe_config
    parallel = config.moe_parallel_config
    if config.moe_backend != "auto":
        raise ValueError(f"moe_backend must be 'auto', got {config.moe_backend!r}")
    if config.is_lora_enabled:
        check_lora(config.moe_parallel_config, _lora_config(), format.interleaved)
    if parallel.enable_eplb:
        raise ValueError("load balancing of experts (EPLB) must be off: packed experts are not moved between ranks")
    if getattr(layer.expert_map_manager, "num_fused_shared_experts", 0):
        raise ValueError("shared experts must not be fused with the routed ones")
    known = settings.all2all_backends()
    if _exchanges(parallel) and parallel.all2all_backend not in known:
        raise ValueError(f"all2all_backend must be one of {list(known)}, got {parallel.all2all_backend!r}")


def _lora_config() -> Any:
    from vllm.config import get_current_vllm_config

    return get_current_vllm_config().lora_config


def _exchanges(parallel: Any) -> bool:
    """Whether ranks have tokens of their own, which must come together where their experts are."""
    return bool(parallel.dp_size > 1 or parallel.use_all2all_kernels)


def _check_shards(sizes: LayerSizes, format: ExpertFormat, config: Any) -> None:
    """A divided intermediate size must not divide what shares a scale: the loader would cut in the wrong place."""
    if config.moe_parallel_config.tp_size == 1:
        return
    if sizes.has_bias and not format.interleaved:  # gpt-oss's own loader gives the second bias to one rank alone
        raise ValueError("tensor parallelism must be off for experts with biases: every rank would add the second one")
    block = {"fp8_block": 128, "mxfp4": 32, "nvfp4": 16}.get(format.scheme, 8)
    if sizes.intermediate % block:
        raise ValueError(
            f"a rank's intermediate size must be a multiple of {block} ({format.name}), got {sizes.intermediate}"
        )
