"""What config.json and hf_quant_config.json of a written checkpoint say of its quantization."""

from __future__ import annotations

from typing import Any

from torch_moe_ops.checkpoints.writing import COMPRESSED_TENSORS, GPT_OSS, MODELOPT, WrittenFormat
from torch_moe_ops.core.version import __version__

_NVFP4 = {"num_bits": 4, "type": "float", "group_size": 16}
_FP8 = {"num_bits": 8, "type": "float"}
# quant_algo -> (weights, activations, group size) of ModelOpt's own words.
_ALGORITHMS: dict[str, tuple[dict[str, Any], dict[str, Any] | None, int | None]] = {
    "NVFP4": ({"dynamic": False, **_NVFP4}, {"dynamic": False, **_NVFP4}, 16),
    "W4A16_NVFP4": ({"dynamic": False, **_NVFP4}, None, 16),
    "FP8": ({"dynamic": False, **_FP8}, {"dynamic": False, **_FP8}, None),
    "MXFP8": ({"dynamic": False, **_FP8, "group_size": 32}, {"dynamic": True, **_FP8, "group_size": 32}, 32),
}


def quantization_config(form: WrittenFormat, ignored: list[str]) -> dict[str, Any]:
    """quantization_config of config.json; {} for unquantized weights.

    Args:
        ignored: modules whose weights are not quantized, by their names in the files.
    """
    if not form.producer:
        return {}
    if form.producer == GPT_OSS:
        return {"quant_method": GPT_OSS, "modules_to_not_convert": ignored}
    groups = {"group_0": _group(form)}
    if form.producer == MODELOPT:
        said = {"quant_method": MODELOPT, "quant_algo": form.kind, "producer": _producer()}
        return {**said, "config_groups": groups, "ignore": ignored}
    return {
        "quant_method": COMPRESSED_TENSORS,
        "format": form.kind,
        "config_groups": groups,
        "ignore": ignored,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
    }


def hf_quant_config(form: WrittenFormat, ignored: list[str]) -> dict[str, Any]:
    """hf_quant_config.json, which ModelOpt writes beside config.json; {} for other producers."""
    if form.producer != MODELOPT:
        return {}
    said = {"quant_algo": form.kind, "kv_cache_quant_algo": None, "exclude_modules": ignored}
    group = _ALGORITHMS[form.kind][2]
    return {"producer": _producer(), "quantization": said | ({"group_size": group} if group else {})}


def _producer() -> dict[str, str]:
    # Readers recognise the format by the name.
    return {"name": MODELOPT, "version": f"torch_moe_ops {__version__}"}


def _group(form: WrittenFormat) -> dict[str, Any]:
    if form.producer == MODELOPT:
        weights, inputs, _ = _ALGORITHMS[form.kind]
        return {"targets": ["Linear"], "weights": weights} | ({"input_activations": inputs} if inputs else {})
    group = {"targets": ["Linear"], "weights": form.weights, "input_activations": form.inputs}
    return {**group, "output_activations": None, "format": form.kind}
