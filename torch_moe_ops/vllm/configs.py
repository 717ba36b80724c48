"""Quantization configs that put our method before vLLM's own, registered under vLLM's names.

This module needs vLLM; `register` imports it.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.modelopt import (
    ModelOptFp8Config,
    ModelOptMixedPrecisionConfig,
    ModelOptNvFp4Config,
)
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config, Mxfp4Config
from vllm.platforms import current_platform

from torch_moe_ops.core.version import __version__
from torch_moe_ops.vllm import recognize, settings
from torch_moe_ops.vllm.log import logger, say_once
from torch_moe_ops.vllm.method import MoeqMethod, method_of, takes_shared
from torch_moe_ops.vllm.plan import plan_layer
from torch_moe_ops.vllm.shared_experts import keep_until_prepared

# Name in vLLM's registry -> its config there, and what tells the format of a layer's experts.
CONFIGS: dict[str, tuple[type, recognize.Recognizer]] = {
    "modelopt": (ModelOptFp8Config, recognize.modelopt),
    "modelopt_fp4": (ModelOptNvFp4Config, recognize.modelopt),
    "modelopt_mixed": (ModelOptMixedPrecisionConfig, recognize.modelopt_mixed),
    "compressed-tensors": (CompressedTensorsConfig, recognize.compressed_tensors),
    "mxfp4": (Mxfp4Config, recognize.mxfp4),
    "gpt_oss_mxfp4": (GptOssMxfp4Config, recognize.mxfp4),
    "fp8": (Fp8Config, recognize.fp8),
}


def register_configs() -> None:
    """Put ours in the place of vLLM's."""
    for name, config in OURS.items():
        register_quantization_config(name)(config)


def config_class(base: type, recognizer: recognize.Recognizer) -> type:
    """A subclass of vLLM's config whose experts are ours where they can be."""

    def get_quant_method(self: Any, layer: torch.nn.Module, prefix: str) -> Any:
        method = our_method(self, recognizer, layer, prefix) if isinstance(layer, RoutedExperts) else None
        if method is None:
            method = base.get_quant_method(self, layer, prefix)  # type: ignore[attr-defined]
            if method is not None and ".shared_expert" in prefix:
                keep_until_prepared(method, _runners(), takes_shared)
        return method

    body = {"get_quant_method": get_quant_method, "__doc__": base.__doc__, "__module__": __name__}
    return type(f"Moeq{base.__name__}", (base,), body)


def our_method(config: Any, recognizer: recognize.Recognizer, layer: Any, prefix: str) -> MoeqMethod | None:
    """Our method for a layer of experts; None, after a line that says why, where vLLM's own one has to do it."""
    device = torch.device(current_platform.device_type)
    try:
        format = recognizer(config, layer, prefix)
        if format is None:
            return None  # not quantized: nothing to say
        plan = plan_layer(layer, format, device)
    except ValueError as error:
        say_once(logger.info, "torch_moe_ops: left to vLLM: %s (first in %s)", str(error), prefix)
        return None
    how = "weight-only" if plan.act_format == "none" else f"{plan.act_format} activations"
    if plan.exchanges:
        how += f", tokens exchanged by {layer.moe_config.moe_parallel_config.all2all_backend}"
    line = "torch_moe_ops: %s experts on backend %s, %s (first in %s)"
    say_once(logger.info, line, format.name, plan.backend, how, prefix)
    _tell_compiled_graphs_apart(
        f"{__version__} {format.name} {plan.backend} {plan.act_format} {settings.shared_experts()}"
    )
    return method_of(config, layer, plan, prefix, _runners())


def _runners() -> dict[str, Any]:
    """vLLM's layers of the model that is being made, by their names; others of its layers are there, too."""
    return get_current_vllm_config().compilation_config.static_forward_context


def _tell_compiled_graphs_apart(text: str) -> None:
    """vLLM keeps compiled graphs between runs by its config, which says nothing of who runs the experts."""
    extra = get_current_vllm_config().additional_config
    if isinstance(extra, dict):
        extra["torch_moe_ops"] = sorted({*extra.get("torch_moe_ops", ()), text})


OURS = {name: config_class(base, recognizer) for name, (base, recognizer) in CONFIGS.items()}
# vLLM sends configs to its worker processes, which find their classes here by name.
globals().update({config.__name__: config for config in OURS.values()})
