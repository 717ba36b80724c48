"""What config.json says about the experts: activation, its constants, counts, and quantization settings."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_NESTED = ("text_config", "llm_config", "language_config")
_GATED = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
    "swigluoai": "swigluoai",
    "swiglustep": "swiglustep",
    "situ": "situ",
}
_NOT_GATED = {"silu": "silu_no_mul", "swish": "silu_no_mul", "gelu": "gelu_no_mul", "relu2": "relu2_no_mul"}
# OpenAI's gpt-oss reference: (up + 1) * gate * sigmoid(1.702 * gate), clamped at 7.
_GPT_OSS = {"swiglu_alpha": 1.702, "swiglu_beta": 1.0, "swiglu_limit": 7.0}


@dataclass(frozen=True)
class ModelConfig:
    """The part of a model's config.json that matters here; every field may be absent.

    Args:
        model_type: such as "qwen3_moe".
        hidden_act: as written there.
        constants: swiglu_alpha, swiglu_beta, swiglu_limit, those that are numbers.
        num_experts: routed experts per layer.
        num_hidden_layers: layers without the multi-token-prediction ones.
        quantization: quantization_config (or the "quantization" of an older ModelOpt hf_quant_config.json).
    """

    model_type: str | None = None
    hidden_act: str | None = None
    constants: Mapping[str, float] = field(default_factory=dict)
    num_experts: int | None = None
    num_hidden_layers: int | None = None
    quantization: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_gpt_oss(self) -> bool:
        """gpt-oss says hidden_act "silu" but means its own activation, and interleaves gate and up rows."""
        return self.model_type is not None and self.model_type.startswith("gpt_oss")

    @property
    def weight_arguments(self) -> Mapping[str, Any]:
        """compressed-tensors' settings for weights (num_bits, strategy, ...), {} elsewhere."""
        groups = self.quantization.get("config_groups")
        first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
        weights = first.get("weights") if isinstance(first, dict) else None
        return weights if isinstance(weights, dict) else {}

    @property
    def weight_block_size(self) -> tuple[int, int] | None:
        """Rows and columns of a scale's tile, None where the config does not speak of tiles."""
        size = self.quantization.get("weight_block_size") or self.weight_arguments.get("block_structure")
        if isinstance(size, (list, tuple)) and len(size) == 2:
            return int(size[0]), int(size[1])
        return None


def parse_config(config: Mapping[str, Any], quant_config: Mapping[str, Any]) -> ModelConfig:
    """From config.json and hf_quant_config.json; a multimodal model's settings lie in its text config."""
    nested = [config[key] for key in _NESTED if isinstance(config.get(key), dict)]
    scopes = [config, *nested]

    def find(kind: type | tuple[type, ...], *keys: str) -> Any:
        # The nested config knows the language model better than the outer one.
        for scope in reversed(scopes):
            for key in keys:
                value = scope.get(key)
                if isinstance(value, kind) and not isinstance(value, bool):
                    return value
        return None

    constants = {name: find((int, float), name) for name in _GPT_OSS}
    return ModelConfig(
        model_type=find(str, "model_type"),
        hidden_act=find(str, "mlp_hidden_act", "hidden_act", "hidden_activation"),
        constants={name: float(value) for name, value in constants.items() if value is not None},
        num_experts=find(int, "num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts"),
        num_hidden_layers=find(int, "num_hidden_layers"),
        quantization=find(dict, "quantization_config") or _older_modelopt(quant_config),
    )


def _older_modelopt(quant_config: Mapping[str, Any]) -> Mapping[str, Any]:
    value = quant_config.get("quantization")
    return value if isinstance(value, dict) else {}


def activation_fields(config: ModelConfig, *, is_gated: bool, is_gpt_oss: bool) -> dict[str, Any]:
    """RawWeights' activation and constants; {} where the config names no activation that the library knows.

    Args:
        is_gated: whether the files hold gate matrices.
        is_gpt_oss: whether config or tensors say so.
    """
    if is_gpt_oss:
        return {"activation": "swigluoai", **_GPT_OSS, **config.constants}
    if config.hidden_act is None:
        return {}
    activation = (_GATED if is_gated else _NOT_GATED).get(config.hidden_act)
    if activation is None:
        kind = "gated" if is_gated else "not gated"
        warnings.warn(
            f"hidden_act {config.hidden_act!r} of a {kind} expert is unknown: give the activation to prepare()",
            stacklevel=4,
        )
        return {}
    if activation == "swigluoai":
        return {"activation": activation, **config.constants}
    # DeepSeek-V4 clamps both halves of its silu; other models have no use for the key.
    limit = config.constants.get("swiglu_limit")
    takes_limit = activation in ("silu", "swiglustep") and limit is not None and limit > 0
    return {"activation": activation, **({"swiglu_limit": limit} if takes_limit else {})}
