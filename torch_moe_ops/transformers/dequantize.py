"""Quantized linears outside the experts: dequantized once, while transformers loads them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps, build_glob_alternation

from torch_moe_ops.checkpoints.index import CheckpointIndex
from torch_moe_ops.files.errors import CheckpointError
from torch_moe_ops.numerics import nvfp4

# What ModelOpt stores beside a linear's weight. The input scale is read and dropped: activations of these
# linears stay unquantized.
PARTS = ("weight", "weight_scale", "weight_scale_2", "input_scale")
_HARMLESS = {*PARTS, "bias", "k_scale", "v_scale", "output_scale"}


def check_linears(index: CheckpointIndex) -> None:
    """CheckpointError for the first quantized linear outside the experts that could not be dequantized."""
    quantized = [name for name in index.entries if name.endswith(".weight_scale") and ".experts." not in name]
    for scale in quantized:
        weight = f"{scale.removesuffix('_scale')}"
        dtype = index.entries[weight].dtype if weight in index.entries else "none"
        if dtype not in ("U8", "F8_E4M3"):
            raise CheckpointError(f"{index.path}: tensor {weight} must have dtype U8 (NVFP4) or F8_E4M3, got {dtype}")
        if dtype == "U8" and f"{scale}_2" not in index.entries:
            raise CheckpointError(f"{index.path}: tensor {scale}_2 is missing beside {weight}")
    modules = {scale.removesuffix(".weight_scale") for scale in quantized}
    for name in index.entries:
        module, _, part = name.rpartition(".")
        if module in modules and part not in _HARMLESS:
            raise CheckpointError(f"{index.path}: tensor {name}: nothing here applies a {part} to a dequantized linear")


def dequantize_linear(name: str, weight: Tensor, parts: dict[str, Tensor]) -> Tensor:
    """One linear's weight in float32.

    Args:
        name: for messages.
        weight: uint8 [N, K/2] (NVFP4) or float8_e4m3fn [N, K].
        parts: "weight_scale" (float8_e4m3fn [N, K/16] for NVFP4; one element or one per row for FP8) and, for
            NVFP4, "weight_scale_2" []. Both multiply.
    """
    scale = parts.get("weight_scale")
    if scale is None:
        raise CheckpointError(f"tensor {name} must have a weight_scale beside it for dtype {weight.dtype}, got none")
    if weight.dtype == torch.uint8:
        scale_2 = parts["weight_scale_2"].float().reshape(())
        _check_scale(name, "weight_scale_2", scale_2)
        return nvfp4.dequantize(weight, scale, scale_2)
    if weight.dtype != torch.float8_e4m3fn:
        raise CheckpointError(f"tensor {name} must have dtype uint8 (NVFP4) or float8_e4m3fn, got {weight.dtype}")
    rows = weight.shape[0]
    if scale.numel() != 1 and tuple(scale.shape) not in ((rows,), (rows, 1)):
        requirement = f"have one element, or one per row ({rows})"
        raise CheckpointError(f"tensor {name}: weight_scale must {requirement}, got {tuple(scale.shape)}")
    _check_scale(name, "weight_scale", scale)
    return weight.float() * scale.float().reshape(-1, 1)


def _check_scale(name: str, part: str, scale: Tensor) -> None:
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise CheckpointError(f"tensor {name}: {part} must be finite and positive, got {scale.flatten()[:4].tolist()}")


class DequantizeLinear(ConversionOps):
    """First step of loading a weight: dequantize it where the checkpoint stores scales beside it."""

    def __init__(self, hf_quantizer: Any) -> None:
        self.hf_quantizer = hf_quantizer  # transformers casts no input of an operation that has one

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str] | None = None,
        target_patterns: list[str] | None = None,
        full_layer_name: str | None = None,
        model: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """{source pattern: tensors} -> {weight pattern: weights in the dtype of the parameter}."""
        name = full_layer_name or "weight"
        dtype = _parameter_dtype(model, name, self.hf_quantizer.dtype)
        converted: dict[str, Any] = {}
        for pattern, tensors in input_dict.items():
            if not pattern.endswith("weight"):
                continue
            prefix = pattern.removesuffix("weight")
            parts = {part: input_dict[prefix + part] for part in PARTS[1:] if prefix + part in input_dict}
            weights = [
                _weight(name, tensor, {part: values[i] for part, values in parts.items()}).to(dtype)
                for i, tensor in enumerate(tensors)
            ]
            # transformers looks for the key in the parameter's name: the full name says it exactly.
            converted[name if pattern == "weight" else pattern] = weights
        return converted

    @property
    def reverse_op(self) -> ConversionOps:
        raise ValueError("a dequantized linear cannot be saved in its quantized form")


def _weight(name: str, weight: Tensor, parts: dict[str, Tensor]) -> Tensor:
    plain = weight.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return weight if plain and "weight_scale" not in parts else dequantize_linear(name, weight, parts)


def _parameter_dtype(model: Any, name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype that transformers would cast to: what the model keeps in float32, else its parameter's."""
    plan = model._get_dtype_plan(dtype)
    if plan:
        pattern, globs, _ = build_glob_alternation(list(plan))
        match = pattern.search(name)
        if match is not None and match.lastgroup is not None:
            return plan[globs[match.lastgroup]]
    try:
        return model.get_parameter_or_buffer(name).dtype
    except AttributeError:
        return dtype
