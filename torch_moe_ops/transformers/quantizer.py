"""Quantizer for quant_method "modelopt": from_pretrained on a ModelOpt export keeps the experts packed.

transformers loads everything but the experts; they come from the same files through `load_experts`.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

import torch
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from torch_moe_ops.checkpoints.index import CheckpointIndex, open_checkpoint
from torch_moe_ops.transformers.attach import ExpertsModule, attach_to, find_experts, remove_parameters
from torch_moe_ops.transformers.dequantize import PARTS, DequantizeLinear, check_linears
from torch_moe_ops.transformers.experts import IMPLEMENTATION

METHOD = "modelopt"
# Expert tensors are loaded by load_experts, the scales of a quantized cache by nobody.
_NOT_LOADED_HERE = (r"\.experts\.", r"\.(?:[kv]_scale|output_scale)$")


class ModelOptConfig(QuantizationConfigMixin):
    """quantization_config of a ModelOpt export, kept as it was written; the tensors say what is quantized.

    Older exports describe themselves only in hf_quant_config.json: set
    `config.quantization_config = {"quant_method": "modelopt"}` and give that config to from_pretrained.
    """

    def __init__(self, **settings: Any) -> None:
        self.__dict__.update(settings, quant_method=METHOD)


class ModelOptQuantizer(HfQuantizer):
    """Leaves the experts to `load_experts` and dequantizes other quantized linears (NVFP4, FP8) while loading.

    Dense linears run in the model's dtype: their calibrated input scales are not used.

    Raises ValueError for what would load wrong: experts that the model class does not run through the experts
    interface, tensor or expert parallelism, modules offloaded to disk, weights that cannot be dequantized.
    """

    requires_calibration = False
    load_options: ClassVar[dict[str, Any]] = {}  # set by `register`

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.serialized_names = {"weight": list(PARTS)}
        self.dtype = torch.get_default_dtype()
        self._path = ""
        self._experts: list[ExpertsModule] = []
        self._options = dict(self.load_options)

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError("device_map must not offload to disk for a ModelOpt checkpoint: experts stay in memory")

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        self.dtype = dtype
        return dtype

    def get_load_operations(self) -> dict[str, Any]:
        return {"deserialize": DequantizeLinear, "dequantize": DequantizeLinear}

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        if not self.pre_quantized or not checkpoint_files:
            raise ValueError("quant_method 'modelopt' must come with the files of a ModelOpt export, got none")
        if getattr(model.config, "distributed_config", None) is not None:
            raise ValueError("distributed_config must be None for a ModelOpt checkpoint: experts are not sharded here")
        self._path = os.path.dirname(checkpoint_files[0])
        index = open_checkpoint(self._path)
        check_linears(index)
        self._experts = find_experts(model)
        _check_layers(model, index, self._experts)
        for found in self._experts:
            remove_parameters(found.module)
            found.module._is_hf_initialized = True  # else transformers initializes what was removed
        known = set(model._keys_to_ignore_on_load_unexpected or ())
        model._keys_to_ignore_on_load_unexpected = known | set(_NOT_LOADED_HERE)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self._experts:
            attach_to(model, self._experts, self._path, **self._options)
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return False  # dequantized linears are not what the files held

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True


def _check_layers(model: Any, index: CheckpointIndex, modules: list[ExpertsModule]) -> None:
    """The experts of every layer that the model has must be run by a module that was found."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    stored = {layer.number for layer in index.layers if not layer.mtp and (count is None or layer.number < count)}
    lost = sorted(stored - {found.layer for found in modules})
    if lost:
        raise ValueError(
            f"{type(model).__name__} must run its experts through the experts interface of transformers for "
            f"experts_implementation {IMPLEMENTATION!r}, got other modules in layers {lost} ({index.path})"
        )
