"""What config.json says about the experts: activation, its constants, counts, and quantization settings."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch_moe_ops.files.errors import CheckpointError, short

_NESTED = ("text_config", "llm_config", "language_config")
NUM_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
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
        constants: swiglu_alpha, swiglu_beta, swiglu_limit, those that are given; finite.
        num_experts: routed experts per layer.
        num_hidden_layers: layers without the multi-token-prediction ones.
        quantization: quantization_config (or the "quantization" of an older ModelOpt hf_quant_config.json).
        file: config.json, for messages.
    """

    model_type: str | None = None
    hidden_act: str | None = None
    constants: Mapping[str, float] = field(default_factory=dict)
    num_experts: int | None = None
    num_hidden_layers: int | None = None
    quantization: Mapping[str, Any] = field(default_factory=dict)
    file: str = "config.json"

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
        """Rows and columns of a scale's tile, None where the config does not speak of tiles.

        Raises CheckpointError where it says something else than two sizes.
        """
        for key, scope in (("weight_block_size", self.quantization), ("block_structure", self.weight_arguments)):
            size = scope.get(key)
            if size is None:
                continue
            if not isinstance(size, (list, tuple)) or len(size) != 2 or not all(_is_count(n) and n > 0 for n in size):
                raise _wrong(self.file, key, "be null or two positive integers", size)
            return size[0], size[1]
        return None


def parse_config(config: Mapping[str, Any], quant_config: Mapping[str, Any], file: str = "config.json") -> ModelConfig:
    """From config.json and hf_quant_config.json; a multimodal model's settings lie in its text config.

    Raises:
        CheckpointError: naming `file`, where a constant or a count is none, or counts contradict each other.
    """
    nested = [config[key] for key in _NESTED if isinstance(config.get(key), dict)]
    # The nested config knows the language model better than the outer one.
    scopes = [*reversed(nested), config, _dbrx_ffn(config)]

    def find(kind: type, *keys: str) -> Any:
        found = (scope[key] for scope in scopes for key in keys if isinstance(scope.get(key), kind))
        return next(found, None)

    constants = {name: _constant(scopes, name, file) for name in _GPT_OSS}
    return ModelConfig(
        model_type=find(str, "model_type"),
        hidden_act=find(str, "mlp_hidden_act", "hidden_act", "hidden_activation", "activation_function"),
        constants={name: value for name, value in constants.items() if value is not None},
        num_experts=_count(scopes, NUM_EXPERTS, file),
        num_hidden_layers=_count(scopes, ("num_hidden_layers",), file),
        quantization=find(dict, "quantization_config") or _older_modelopt(quant_config),
        file=file,
    )


def _dbrx_ffn(config: Mapping[str, Any]) -> dict[str, Any]:
    """What DBRX keeps in a config of its own, by the names that others have for it; {} of other models."""
    ffn = config.get("ffn_config")
    if not isinstance(ffn, dict) or "moe_num_experts" not in ffn:
        return {}
    activation = ffn.get("ffn_act_fn")
    name = activation.get("name") if isinstance(activation, dict) else None
    return {"moe_num_experts": ffn["moe_num_experts"], "hidden_act": name or "silu"}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _wrong(file: str, key: str, requirement: str, got: Any) -> CheckpointError:
    return CheckpointError(f"{file}: {key} must {requirement}, got {short(repr(got))}")


def _count(scopes: list[Mapping[str, Any]], keys: tuple[str, ...], file: str) -> int | None:
    """The count that the first scope with one gives, under whichever of its names."""
    for scope in scopes:
        # A list counts several kinds of experts (Ernie's for text and for images): the files say how many there are.
        said = {key: scope[key] for key in keys if scope.get(key) is not None and not isinstance(scope[key], list)}
        for key, value in said.items():
            if not _is_count(value):
                raise _wrong(file, key, "be null or an integer, zero or greater", value)
        if len(set(said.values())) > 1:
            raise CheckpointError(f"{file}: {' and '.join(said)} must agree, got {said}")
        if said:
            return next(iter(said.values()))
    return None


def _constant(scopes: list[Mapping[str, Any]], key: str, file: str) -> float | None:
    """A constant of the activation; float64 can hold it."""
    value = next((scope[key] for scope in scopes if scope.get(key) is not None), None)
    if value is None:
        return None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not abs(value) <= sys.float_info.max or (key == "swiglu_limit" and value < 0):
        what = "a finite number, zero or greater" if key == "swiglu_limit" else "a finite number"
        raise _wrong(file, key, f"be null or {what}", value)
    return float(value)


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
        kind, name = "gated" if is_gated else "not gated", short(repr(config.hidden_act))
        warnings.warn(
            f"hidden_act {name} of a {kind} expert is unknown: give the activation to prepare()", stacklevel=4
        )
        return {}
    if activation == "swigluoai":
        return {"activation": activation, **config.constants}
    # DeepSeek-V4 clamps both halves of its silu; other models have no use for the key.
    # Zero stands for none in some configs.
    limit = config.constants.get("swiglu_limit")
    takes_limit = activation in ("silu", "swiglustep") and limit is not None and limit > 0
    return {"activation": activation, **({"swiglu_limit": limit} if takes_limit else {})}
