"""Experts of one layer as vLLM loads them from a checkpoint: for each format its config, its tensors, and who runs it.

What stands here is what bench_vllm_layer.py builds vLLM's layers of; it needs vLLM only where a config is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from moe_peers import common
from torch import Tensor

Named = Iterator[tuple[str, Tensor]]  # (name of the layer's parameter, what the checkpoint has)


@dataclass(frozen=True)
class Format:
    """One way to store experts.

    registered: vLLM's name of the config, under which ours stands once the plug-in is registered.
    base: "module:class" of vLLM's own config.
    config: what config.json says of the quantization.
    tensors: what the checkpoint holds.
    ways: vLLM's `moe_backend` words whose kernels run it on Hopper, the one that vLLM takes by itself first.
    """

    registered: str
    base: str
    config: dict[str, Any]
    tensors: Callable[[common.Weights], Named]
    ways: tuple[str, ...]


def _nvfp4(weights: common.Weights) -> Named:
    for which, name in ((1, "w13"), (2, "w2")):
        codes, scale, factor = weights.matrix(which)
        halves = factor[:, None].expand(-1, 2) if which == 1 else factor
        yield f"{name}_weight", codes
        yield f"{name}_weight_scale", scale
        yield f"{name}_weight_scale_2", halves
        yield f"{name}_input_scale", torch.full_like(halves, 1e-3)


def _scaled(suffix: str) -> Callable[[common.Weights], Named]:
    """Codes, and scales under the name that ends so."""

    def tensors(weights: common.Weights) -> Named:
        for which, name in ((1, "w13"), (2, "w2")):
            codes, scale, _ = weights.matrix(which)
            yield f"{name}_weight", codes
            yield f"{name}_{suffix}", scale

    return tensors


def _int4(weights: common.Weights) -> Named:
    """Eight codes of a row in an int32."""
    for which, name in ((1, "w13"), (2, "w2")):
        codes, scale, _ = weights.matrix(which)
        sizes = torch.tensor([codes.shape[1], codes.shape[2] * 2], device=codes.device)
        yield f"{name}_weight_packed", codes.view(torch.int32)
        yield f"{name}_weight_scale", scale
        yield f"{name}_weight_shape", sizes.expand(codes.shape[0], 2)


def _compressed_int4(group: int) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": [],
    }


_AT = "vllm.model_executor.layers.quantization"
_COMPRESSED = f"{_AT}.compressed_tensors.compressed_tensors:CompressedTensorsConfig"
FORMATS = {
    "nvfp4": Format(
        "modelopt_fp4",
        f"{_AT}.modelopt:ModelOptNvFp4Config",
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": 16,
            "kv_cache_quant_algo": None,
            "exclude_modules": [],
        },
        _nvfp4,
        ("marlin", "humming"),
    ),
    "fp8": Format(
        "fp8",
        f"{_AT}.fp8:Fp8Config",
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        _scaled("weight_scale_inv"),
        ("triton", "humming"),
    ),
    "mxfp4": Format(
        "mxfp4", f"{_AT}.mxfp4:Mxfp4Config", {"quant_method": "mxfp4"}, _scaled("weight_scale"), ("marlin", "humming")
    ),
    "int4g32": Format("compressed-tensors", _COMPRESSED, _compressed_int4(32), _int4, ("marlin",)),
    "int4": Format("compressed-tensors", _COMPRESSED, _compressed_int4(128), _int4, ("marlin",)),
}


def config_of(fmt: str, ours: bool) -> Any:
    """vLLM's config of such a checkpoint, or ours, which vLLM finds under the same name once the plug-in is there."""
    import importlib

    from vllm.model_executor.layers.quantization import get_quantization_config

    found = FORMATS[fmt]
    module, _, name = found.base.partition(":")
    kind = get_quantization_config(found.registered) if ours else getattr(importlib.import_module(module), name)
    config = kind.from_config(found.config)
    config.packed_modules_mapping = {}
    return config


def fill(experts: Any, fmt: str, weights: common.Weights) -> None:
    """Give vLLM's RoutedExperts a checkpoint's tensors.

    Some of vLLM's methods keep them transposed, and one number instead of one for each half of w13.
    """
    for name, tensor in FORMATS[fmt].tensors(weights):
        place = getattr(experts, name).data
        if place.shape != tensor.shape and place.dim() == 3:
            tensor = tensor.transpose(1, 2)
        if place.dim() < tensor.dim():
            tensor = tensor[..., 0]
        if place.shape != tensor.shape:
            raise ValueError(f"{name} must have shape {tuple(tensor.shape)} in vLLM's layer, got {tuple(place.shape)}")
        place.copy_(tensor)
