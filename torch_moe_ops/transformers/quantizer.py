"""The quantizer that from_pretrained uses for checkpoints with quantized experts: they stay packed.

transformers loads everything but the experts; they come from the same files through `load_experts`.
"""

from __future__ import annotations

import logging
import os
from typing import Any, ClassVar

import torch
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from torch_moe_ops.checkpoints.index import CheckpointIndex, open_checkpoint
from torch_moe_ops.checkpoints.layer import LayerSource
from torch_moe_ops.checkpoints.naming import ExpertLayer
from torch_moe_ops.core.schemes import get_scheme
from torch_moe_ops.files.tensor_reader import TensorReader
from torch_moe_ops.transformers.attach import attach_to
from torch_moe_ops.transformers.dequantize import DequantizeLinear, parameter_dtype, weight_conversions
from torch_moe_ops.transformers.experts import IMPLEMENTATION
from torch_moe_ops.transformers.linears import PARTS, check_linears, stored_dtype
from torch_moe_ops.transformers.modules import ExpertsModule, find_experts, remove_parameters
from torch_moe_ops.transformers.placement import release, reserve

MODELOPT = "modelopt"
# Expert tensors are loaded by load_experts, the scales of a quantized cache by nobody.
_NOT_LOADED_HERE = (r"\.experts\.", r"\.mlp\.(?:input|output)_linear\.", r"\.(?:[kv]_scale|output_scale)$")
_log = logging.getLogger(__name__)


class CheckpointConfig(QuantizationConfigMixin):
    """quantization_config of a checkpoint, kept as it was written; the tensors say what is quantized."""

    def __init__(self, **settings: Any) -> None:
        self.__dict__.update(settings)
        self.quant_method: Any = settings.get("quant_method", MODELOPT)


class MoeqConfig(QuantizationConfigMixin):
    """quantization_config for from_pretrained of an unquantized checkpoint: its experts are quantized while loading.

        from_pretrained(folder, quantization_config=MoeqConfig(scheme="nvfp4"))

    Layer by layer from the files: unquantized experts of more than one layer are never in memory.

    Args:
        scheme: as in `quantize_experts`; "none" runs the unquantized op.
        act_format: as in `prepare`.
        prepare_options: given to `prepare` for every layer, and route and host_experts as in `attach_experts`.
    """

    def __init__(self, scheme: str = "nvfp4", act_format: str = "none", **prepare_options: Any) -> None:
        get_scheme(scheme)
        self.scheme = scheme
        self.act_format = act_format
        self.prepare_options = prepare_options
        self.quant_method: Any = IMPLEMENTATION

    @property
    def load_options(self) -> dict[str, Any]:
        return {"scheme": self.scheme, "act_format": self.act_format, **self.prepare_options}


class PackedExperts(HfQuantizer):
    """Leaves the experts to `load_experts` and dequantizes other quantized linears while transformers loads them.

    Dense linears run in the model's dtype: their calibrated input scales are not used. A checkpoint of a format that
    transformers reads, but whose experts are not quantized or are linears of their own in the model class, is left
    to transformers' own quantizer.

    Raises ValueError for what would load wrong: experts that the model class does not run through the experts
    interface, tensor or expert parallelism, modules offloaded to disk, weights that cannot be dequantized,
    parameters that the files do not hold.
    """

    requires_calibration = False
    load_options: ClassVar[dict[str, Any]] = {}  # set by `register`

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.dtype = torch.get_default_dtype()
        self._environment: dict[str, Any] = {}
        self._index: CheckpointIndex | None = None
        self._parts: set[str] = set()
        self._experts: list[ExpertsModule] = []
        self._dtypes: dict[str, torch.dtype] = {}
        self._missing: list[str] = []
        own = quantization_config.load_options if isinstance(quantization_config, MoeqConfig) else self.load_options
        self._options = dict(own)

    @property
    def method(self) -> str:
        return self.quantization_config.quant_method

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError(
                f"device_map must not offload to disk for a {self.method} checkpoint: experts stay in memory"
            )
        release(self._experts)  # where transformers chose the devices, it has done so
        self._environment = {"device_map": device_map, **kwargs}

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        self.dtype = dtype
        return dtype

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        if not self.pre_quantized or not checkpoint_files:
            raise ValueError(f"quant_method {self.method!r} must come with the files of a checkpoint, got none")
        index = open_checkpoint(os.path.dirname(checkpoint_files[0]))
        modules = find_experts(model)
        reason = self._not_ours(model, index, modules)
        if reason:
            self._become_theirs(model, reason)
            self._process_model_before_weight_loading(model, checkpoint_files=checkpoint_files, **kwargs)
            return
        if getattr(model.config, "distributed_config", None) is not None:
            raise ValueError(
                f"distributed_config must be None for a {self.method} checkpoint: experts are not sharded here"
            )
        _check_layers(model, index, modules)
        linears = check_linears(index)
        self._index, self._experts = index, modules
        names = {name.rpartition(".")[2] for parts in linears.values() for name in parts.values()}
        self._parts = names & set(PARTS)
        for found in modules:
            remove_parameters(found.module)
            found.module._is_hf_initialized = True  # else transformers initializes what was removed
        if isinstance(self._environment.get("device_map"), str):  # such as "auto"
            reserve(modules, index, self._options.get("scheme"))
        self._dtypes = {name: parameter_dtype(model, name, self.dtype) for name in model.state_dict()}
        known = set(model._keys_to_ignore_on_load_unexpected or ())
        model._keys_to_ignore_on_load_unexpected = known | set(_NOT_LOADED_HERE)
        self._watch_missing_keys(model)

    def _convert_model_for_quantization(self, model: Any) -> None:
        """Not into modules of linears, as transformers does for its own quantizers: experts stay together."""

    def _not_ours(self, model: Any, index: CheckpointIndex, modules: list[ExpertsModule]) -> str:
        """Why transformers' own quantizer is the one to load this, "" where it is not."""
        if self.method in (MODELOPT, IMPLEMENTATION):
            return ""  # transformers has none
        layers = _layers_of(model, index)
        if modules and not layers:
            return ""  # what their experts are is not known here: refused below
        if not _any_quantized(layers, index):
            return "its experts are not quantized"
        lost = {layer.number for layer in layers} - {found.layer for found in modules}
        if lost and not modules and not _fused_parameters(model):
            return "the experts of the model class are linears of their own"
        return ""

    def _become_theirs(self, model: Any, reason: str) -> None:
        """Turn into transformers' quantizer of this method, which from_pretrained goes on with."""
        from transformers.quantizers.auto import AutoHfQuantizer

        _log.warning("%s of quant_method %r is left to transformers: %s", type(model).__name__, self.method, reason)
        theirs = AutoHfQuantizer.from_config(vars(self.quantization_config), pre_quantized=True)
        theirs.validate_environment(**self._environment)
        theirs._convert_model_for_quantization(model)
        model.config.quantization_config = theirs.quantization_config
        self.__class__, self.__dict__ = type(theirs), theirs.__dict__  # type: ignore[assignment]

    def _watch_missing_keys(self, model: Any) -> None:
        """Learn from transformers which parameters no file held: it only warns of them, and leaves them random."""
        adjust = model._adjust_missing_and_unexpected_keys

        def adjust_and_note(info: Any) -> None:
            adjust(info)
            self._missing = sorted(info.missing_keys)
            del model._adjust_missing_and_unexpected_keys

        model._adjust_missing_and_unexpected_keys = adjust_and_note

    def update_weight_conversions(self, weight_conversions_of_model: list[Any], model: Any = None) -> list[Any]:
        assert self._index is not None  # set before any weight is loaded
        operation = DequantizeLinear(self, self._index, self.dtype)
        return weight_conversions(weight_conversions_of_model, self._parts, operation)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        assert self._index is not None
        self._check_loaded(model)
        if self._experts:
            attach_to(model, self._experts, self._index.path, **self._options)
        self._index, self._experts = None, []  # the model keeps its quantizer
        return model

    def _check_loaded(self, model: Any) -> None:
        path = self._index.path if self._index else ""
        if self._missing:
            more = f" and {len(self._missing) - 4} more" if len(self._missing) > 4 else ""
            raise ValueError(
                f"{path}: must hold every parameter of {type(model).__name__}, {self._missing[:4]}{more} missing"
            )
        # Before 5.21 transformers leaves what has another name in the files in their dtype.
        for name, parameter in model.named_parameters():
            if parameter.dtype != self._dtypes.get(name, parameter.dtype) and not stored_dtype(parameter.dtype):
                parameter.data = parameter.data.to(self._dtypes[name])
        _cast_buffers(model, self._dtypes)
        for name, parameter in model.named_parameters():
            if stored_dtype(parameter.dtype):
                raise ValueError(f"{path}: {name} must have been dequantized, got codes of dtype {parameter.dtype}")

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return False  # dequantized linears are not what the files held

    @property
    def is_trainable(self) -> bool:
        return True  # through the experts, and by adapters on them (peft.py); their weights get no gradient

    @property
    def is_compileable(self) -> bool:
        return True


def _layers_of(model: Any, index: CheckpointIndex) -> list[ExpertLayer]:
    """Layers of the checkpoint with experts that the model has too."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    return [layer for layer in index.layers if not layer.mtp and (count is None or layer.number < count)]


def _any_quantized(layers: list[ExpertLayer], index: CheckpointIndex) -> bool:
    with TensorReader(index) as reader:
        return any(LayerSource(reader, layer).scheme != "none" for layer in layers)


def _fused_parameters(model: Any) -> bool:
    """Whether a module of the model keeps the matrices of several experts in one parameter."""
    return any(p.ndim >= 3 and "experts" in name.split(".") for name, p in model.named_parameters())


def _check_layers(model: Any, index: CheckpointIndex, modules: list[ExpertsModule]) -> None:
    """The experts of every layer that the model has must be run by a module that was found, and the other way round."""
    stored = {layer.number for layer in _layers_of(model, index)}
    lost = sorted(stored - {found.layer for found in modules})
    if lost:
        raise ValueError(
            f"{type(model).__name__} must run its experts through the experts interface of transformers for "
            f"experts_implementation {IMPLEMENTATION!r}, got other modules in layers {lost} ({index.path})"
        )
    nameless = sorted({found.layer for found in modules} - stored)
    if nameless:
        raise ValueError(
            f"{index.path}: must name the experts of layers {nameless} of {type(model).__name__} "
            "'...experts.<e>.<projection>' or '...experts.<projection>', has none under such names"
        )


def _cast_buffers(model: Any, dtypes: dict[str, torch.dtype]) -> None:
    """Buffers of these names in these dtypes; one that several modules share stays one."""
    cast: dict[int, torch.Tensor] = {}
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        dtype = dtypes.get(name, buffer.dtype)
        if buffer.dtype != dtype and not stored_dtype(buffer.dtype):
            # Another tensor: it may be a view, which Dynamo compares with its base.
            of, _, own = name.rpartition(".")
            model.get_submodule(of)._buffers[own] = cast.setdefault(id(buffer), buffer.to(dtype))
