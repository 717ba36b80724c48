"""Which models from_pretrained gives to `PackedExperts`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from torch_moe_ops.checkpoints.index import QUANT_CONFIG
from torch_moe_ops.checkpoints.model_config import NUM_EXPERTS
from torch_moe_ops.transformers.experts import IMPLEMENTATION
from torch_moe_ops.transformers.quantizer import MODELOPT, CheckpointConfig, MoeqConfig, PackedExperts

# Methods of transformers whose experts `load_experts` reads. Models without experts keep transformers' quantizer.
METHODS = ("compressed-tensors", "mxfp4", "fp8", "gptq", "awq")


def intercept_quantizers() -> None:
    """Make from_pretrained ask `packed_settings` before it chooses a quantizer. May be called again.

    Raises: ImportError where transformers chooses quantizers elsewhere than this release is known to.
    """
    from transformers import __version__, modeling_utils

    theirs = getattr(modeling_utils, "get_hf_quantizer", None)
    if theirs is None:
        raise ImportError(f"register needs transformers >= 5.17, got {__version__}: from_pretrained is another one")
    if not hasattr(theirs, "moeq_original"):
        modeling_utils.get_hf_quantizer = _intercepting(theirs)


def _intercepting(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def get_hf_quantizer(
        config: Any, quantization_config: Any, device_map: Any, weights_only: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # Settings given to from_pretrained ask for one of transformers' own quantizers.
        named = quantization_config is not None or kwargs.get("gguf_file") is not None
        settings = None if named else packed_settings(config)
        if isinstance(quantization_config, MoeqConfig):
            _check_unquantized(config)
            config.quantization_config = quantization_config
        elif settings is None and not named and _asks_for_moeq(config):
            config.quantization_config = MoeqConfig(scheme="none")
        elif settings is None:
            return theirs(config, quantization_config, device_map, weights_only, *args, **kwargs)
        else:
            config.quantization_config = CheckpointConfig(**settings)
        quantizer = PackedExperts(config.quantization_config, pre_quantized=True)
        quantizer.validate_environment(device_map=device_map, weights_only=weights_only)
        return quantizer, config, device_map

    get_hf_quantizer.moeq_original = theirs  # type: ignore[attr-defined]
    return get_hf_quantizer


def _asks_for_moeq(config: Any) -> bool:
    """experts_implementation="moeq" of an unquantized checkpoint."""
    asked = getattr(config, "_experts_implementation", None) == IMPLEMENTATION
    return asked and _said(config) is None and _has_experts(config)


def _check_unquantized(config: Any) -> None:
    said = _said(config)
    if said is not None:
        raise ValueError(f"MoeqConfig: the checkpoint must be unquantized, got quantization_config {said}")


def _said(config: Any) -> Any:
    own = getattr(config, "quantization_config", None)
    return own or getattr(config.get_text_config(decoder=True), "quantization_config", None)


def packed_settings(config: Any) -> dict[str, Any] | None:
    """quantization_config of a model whose experts are to stay packed; None for any other model."""
    said = _said(config)
    if said is None:
        return _older_modelopt(config) if _has_experts(config) else None
    settings = dict(said) if isinstance(said, dict) else said.to_dict()
    method = settings.get("quant_method")
    method = str(getattr(method, "value", method))
    ours = method == MODELOPT or (method in METHODS and _has_experts(config))
    return settings | {"quant_method": method} if ours else None


def _has_experts(config: Any) -> bool:
    scopes = (config.to_dict(), config.get_text_config(decoder=True).to_dict())
    nested = [scope["ffn_config"] for scope in scopes if isinstance(scope.get("ffn_config"), dict)]  # of DBRX
    return any(scope.get(key) for scope in (*scopes, *nested) for key in NUM_EXPERTS)


def _older_modelopt(config: Any) -> dict[str, Any] | None:
    """What hf_quant_config.json says: older ModelOpt exports describe themselves only there."""
    file = _beside(str(getattr(config, "_name_or_path", "") or ""))
    if file is None:
        return None
    with open(file, encoding="utf-8") as stream:
        said = json.load(stream).get("quantization")
    return {**said, "quant_method": MODELOPT} if isinstance(said, dict) else None


def _beside(name: str) -> str | None:
    """hf_quant_config.json of a folder, or of a repository through huggingface_hub's cache."""
    if not name or os.path.isdir(name):
        file = os.path.join(name, QUANT_CONFIG)
        return file if name and os.path.exists(file) else None
    from transformers.utils import cached_file

    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    return cached_file(name, QUANT_CONFIG, _raise_exceptions_for_gated_repo=False, **quiet)
