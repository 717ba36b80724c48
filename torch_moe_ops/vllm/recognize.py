"""Which format the experts of a layer have, read from vLLM's config of the checkpoint.

Each function takes (config, layer, name of the layer) and returns an ExpertFormat, None where the experts are not
quantized, or raises ValueError where the plug-in has no such format.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_moe_ops.vllm import formats
from torch_moe_ops.vllm.formats import ExpertFormat

Recognizer = Callable[[Any, Any, str], ExpertFormat | None]


def modelopt(config: Any, layer: Any, name: str) -> ExpertFormat | None:
    """ModelOpt with one algorithm for all layers."""
    return None if config.is_layer_excluded(name) else _modelopt_algorithm(config, config.quant_method)


def modelopt_mixed(config: Any, layer: Any, name: str) -> ExpertFormat | None:
    """ModelOpt with an algorithm for each layer."""
    if config.is_layer_excluded(name):
        return None
    algorithm = config._resolve_quant_algo(name)
    return None if algorithm is None else _modelopt_algorithm(config, algorithm)


def _modelopt_algorithm(config: Any, algorithm: str) -> ExpertFormat:
    if algorithm in ("NVFP4", "W4A16_NVFP4"):
        if getattr(config, "moe_activation_override", None) is not None:
            raise ValueError("activations of NVFP4 experts must be as the checkpoint has them, got an override")
        group = getattr(config, "group_size", 16)
        if group != 16:
            raise ValueError(f"group_size must be 16 for NVFP4, got {group}")
        return formats.nvfp4_modelopt("nvfp4" if algorithm == "NVFP4" else "none")
    if algorithm == "FP8":
        return formats.fp8("ModelOpt FP8", "tensor", static=True, loader="modelopt")
    raise ValueError(f"quant_algo must be NVFP4, W4A16_NVFP4 or FP8, got {algorithm}")


def mxfp4(config: Any, layer: Any, name: str) -> ExpertFormat:
    """gpt-oss and what follows it."""
    if config.get_name() == "gpt_oss_mxfp4":
        return formats.mxfp4("gpt-oss MXFP4", interleaved=True)
    return formats.mxfp4("MXFP4")


def fp8(config: Any, layer: Any, name: str) -> ExpertFormat | None:
    """DeepSeek's 128 x 128 tiles, and fp8 with a scale for each matrix."""
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

    # The match mode is newer than vLLM 0.26.
    mode = getattr(config, "ignored_layers_match_mode", None)
    options = {} if mode is None else {"match_mode": mode}
    if is_layer_skipped(name, config.ignored_layers, config.packed_modules_mapping, **options):
        return None
    if not config.is_checkpoint_fp8_serialized:
        raise ValueError("weights must be fp8 in the checkpoint, got them quantized while loading")
    if getattr(config, "store_dtype", None) == "mxfp4":
        return formats.mxfp4("MXFP4")
    block = config.weight_block_size
    if block is None:
        return formats.fp8("FP8", "tensor", static=config.activation_scheme == "static")
    if list(block) != [128, 128]:
        raise ValueError(f"weight_block_size must be [128, 128], got {list(block)}")
    return formats.fp8("FP8 128x128", "block", static=False, scale="weight_scale_inv")


def compressed_tensors(config: Any, layer: Any, name: str) -> ExpertFormat | None:
    """The scheme of the layer's projections, which must be one for all of them."""
    config._add_fused_moe_to_target_scheme_map()
    projections = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
    found = [config.get_scheme_dict(layer, f"{name}.0.{p}") for p in projections if p]
    if any(scheme != found[0] for scheme in found):
        raise ValueError("all projections of an expert must have one scheme, got several")
    scheme = found[0]
    if scheme is None:
        return None
    weights, inputs = scheme["weights"], scheme.get("input_activations")
    stored = str(getattr(scheme.get("format"), "value", scheme.get("format")))
    if stored not in _COMPRESSED:
        raise ValueError(f"format must be one of {sorted(_COMPRESSED)}, got {stored}")
    return _COMPRESSED[stored](weights, inputs, layer)


def _word(value: Any) -> str:
    return str(getattr(value, "value", value))


def _is_of(args: Any, kind: str, bits: int) -> bool:
    return args is not None and _word(args.type) == kind and args.num_bits == bits


def _ct_nvfp4(weights: Any, inputs: Any, layer: Any) -> ExpertFormat:
    if inputs is not None and not (_is_of(inputs, "float", 4) and inputs.group_size == 16):
        raise ValueError(f"input_activations of NVFP4 weights must be NVFP4 or null, got {_described(inputs)}")
    return formats.nvfp4_compressed_tensors("none" if inputs is None else "nvfp4")


def _ct_mxfp4(weights: Any, inputs: Any, layer: Any) -> ExpertFormat:
    if inputs is not None and not (_is_of(inputs, "float", 4) and inputs.group_size == 32):
        raise ValueError(f"input_activations of MXFP4 weights must be MXFP4 or null, got {_described(inputs)}")
    act = "none" if inputs is None else "mxfp4"
    return formats.mxfp4("compressed-tensors MXFP4", weight="weight_packed", act_format=act)


def _ct_int4(weights: Any, inputs: Any, layer: Any) -> ExpertFormat:
    if not _is_of(weights, "int", 4) or inputs is not None:
        raise ValueError(f"packed weights must be int4 without input_activations, got {_described(weights, inputs)}")
    if weights.actorder not in (None, False) and _word(weights.actorder) != "static":
        raise ValueError(f"actorder must be null or 'static', got {_word(weights.actorder)!r}")
    strategy = _word(weights.strategy)
    if strategy not in ("group", "channel"):
        raise ValueError(f"strategy of int4 weights must be 'group' or 'channel', got {strategy!r}")
    group = weights.group_size if strategy == "group" else -1
    return formats.int4_compressed_tensors(group or -1, bool(weights.symmetric), layer.params_dtype)


def _ct_fp8(weights: Any, inputs: Any, layer: Any) -> ExpertFormat:
    if not _is_of(weights, "float", 8) or not _is_of(inputs, "float", 8):
        raise ValueError(f"weights and input_activations must be fp8, got {_described(weights, inputs)}")
    strategy = _word(weights.strategy)
    if strategy not in ("tensor", "channel", "block"):
        raise ValueError(f"strategy of fp8 weights must be 'tensor', 'channel' or 'block', got {strategy!r}")
    if strategy == "block" and list(weights.block_structure) != [128, 128]:
        raise ValueError(f"block_structure must be [128, 128], got {list(weights.block_structure)}")
    return formats.fp8("compressed-tensors FP8", strategy, static=not inputs.dynamic)


def _described(*args: Any) -> str:
    return " and ".join("null" if a is None else f"{_word(a.type)}{a.num_bits}, {_word(a.strategy)}" for a in args)


_COMPRESSED: dict[str, Callable[[Any, Any, Any], ExpertFormat]] = {
    "nvfp4-pack-quantized": _ct_nvfp4,
    "mxfp4-pack-quantized": _ct_mxfp4,
    "pack-quantized": _ct_int4,
    "float-quantized": _ct_fp8,
}
