"""act_format="auto": as the checkpoint says where a backend multiplies that natively, else weight-only."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from torch_moe_ops.backends.native import auto_act_format
from torch_moe_ops.core.schemes import get_scheme
from torch_moe_ops.prepared.explaining import explain
from torch_moe_ops.prepared.prepared_weights import PreparedWeights
from torch_moe_ops.weights.raw_weights import RawWeights

AUTO = "auto"
_log = logging.getLogger(__name__)
# What ModelOpt's quant_algo says of activations.
_ALGORITHMS = {
    "NVFP4": "nvfp4",
    "W4A8_NVFP4_FP8": "fp8",
    "W4A8_MXFP4_FP8": "fp8",
    "MXFP8": "mxfp8",
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
}


def stored_act_format(raw: RawWeights, quantization: Mapping[str, Any]) -> str:
    """The activation format that a checkpoint was made for; "none" where it is weight-only or does not say.

    Args:
        quantization: quantization_config of the checkpoint.
    """
    scheme = get_scheme(raw.scheme)
    groups = quantization.get("config_groups")
    algorithm = str(quantization.get("quant_algo")).upper()
    if algorithm in _ALGORITHMS:
        said = _ALGORITHMS[algorithm]
    elif isinstance(groups, dict) and len(groups) == 1:
        said = _of_group(next(iter(groups.values())), raw.scheme)
    elif quantization.get("quant_method") == "fp8" and raw.scheme in ("fp8", "fp8_block"):
        said = "fp8"
    else:  # several kinds of layers in one checkpoint: calibrated input scales tell
        said = scheme.act_formats[0] if raw.a13_input_scale is not None else "none"
    return said if said in scheme.act_formats else "none"


def _of_group(group: Any, scheme: str) -> str:
    """From compressed-tensors' description of a group of layers."""
    inputs = group.get("input_activations") if isinstance(group, dict) else None
    if not isinstance(inputs, dict):
        return "none"
    kind = f"{inputs.get('type', 'float')}{inputs.get('num_bits')}"
    blocks = {"float4": ("nvfp4", "mxfp4"), "float8": ("mxfp8",)}.get(kind, ())  # activations blocked as weights are
    if kind == "int8":
        return "int8" if _is_our_int8(inputs, scheme) else "none"
    return scheme if scheme in blocks else {"float8": "fp8"}.get(kind, "none")


def _is_our_int8(inputs: Mapping[str, Any], scheme: str) -> bool:
    """Whether rounded as the ops do it: symmetrically, by each token's own scale, or by one scale of all tokens."""
    is_static = inputs.get("dynamic", False) is False
    if is_static and "int8" not in get_scheme(scheme).static_acts:
        return False
    return inputs.get("symmetric", True) is True and (is_static or inputs.get("strategy", "token") == "token")


def chosen_act_format(raw: RawWeights, stored: str, device: torch.device, prepare_options: Mapping[str, Any]) -> str:
    """`stored` where `prepare` would take a backend that multiplies it natively on the device, else "none"."""
    if stored == "none":
        return stored
    explanation = explain(raw, act_format=stored, device=device, **prepare_options)
    return auto_act_format(explanation.problem, explanation.requested)


class Choices:
    """What was chosen for the layers of a model, for one line of the log."""

    def __init__(self) -> None:
        self._layers: Counter[tuple[str, str, str]] = Counter()

    def add(self, stored: str, w: PreparedWeights) -> None:
        self._layers[stored, w.act_format, f"{w.backend} on {w.device}"] += 1

    def log(self, path: str) -> None:
        _log.info("experts of %s: %s", path, "; ".join(self._text(*key) for key in self._layers))

    def _text(self, stored: str, chosen: str, where: str) -> str:
        reason = "" if chosen == stored else f" (made for {stored!r}, which no backend multiplies natively here)"
        return f"{self._layers[stored, chosen, where]} layers with act_format {chosen!r}{reason}, backend {where}"
