"""save_pretrained of models with packed experts: an export in a format that other tools read."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from torch_moe_ops.checkpoints.index import QUANT_CONFIG
from torch_moe_ops.transformers.experts import ExpertWeights
from torch_moe_ops.transformers.exporting import export_model
from torch_moe_ops.transformers.host_experts import HostExpertWeights


class _Attached(QuantizationConfigMixin):
    def __init__(self) -> None:
        self.quant_method: Any = "moeq"


class AttachedExperts(HfQuantizer):
    """`model.hf_quantizer` of a model whose experts were attached or quantized in memory."""

    requires_calibration = False

    def __init__(self) -> None:
        super().__init__(_Attached())

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return False  # not by transformers: `save_pretrained` is intercepted

    @property
    def is_trainable(self) -> bool:
        return True  # through the experts, and by adapters on them (peft.py); their weights get no gradient

    @property
    def is_compileable(self) -> bool:
        return True


def intercept_saving() -> None:
    """Make save_pretrained write the packed experts of models that have some. May be called again."""
    theirs = PreTrainedModel.save_pretrained
    if not hasattr(theirs, "moeq_original"):
        PreTrainedModel.save_pretrained = _intercepting(theirs)  # type: ignore[method-assign]


def _intercepting(theirs: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(theirs)
    def save_pretrained(
        self: Any,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: Any = None,
        **options: Any,
    ) -> None:
        options |= {"is_main_process": is_main_process, "state_dict": state_dict}
        adapters = getattr(self, "_hf_peft_config_loaded", False)  # of which transformers writes nothing else
        if adapters or not any(isinstance(module, (ExpertWeights, HostExpertWeights)) for module in self.modules()):
            theirs(self, save_directory, **options)
        else:
            _save(theirs, self, os.fspath(save_directory), options)

    save_pretrained.moeq_original = theirs  # type: ignore[attr-defined]
    return save_pretrained


def _save(theirs: Callable[..., None], model: Any, folder: str, options: dict[str, Any]) -> None:
    for name, needed in (("state_dict", None), ("save_original_format", True), ("distributed_checkpoint", False)):
        got = options.pop(name, needed)
        if got is not needed:
            kind = got if isinstance(got, bool) else type(got).__name__
            raise ValueError(f"save_pretrained: {name} must be {needed} for a model with packed experts, got {kind}")
    export = export_model(model)
    os.makedirs(folder, exist_ok=True)
    _write_quant_config(os.path.join(folder, QUANT_CONFIG), export.hf_quant_config)
    with _unquantized(model, export.quantization):
        theirs(model, folder, state_dict=export.tensors, save_original_format=False, **options)


def _write_quant_config(file: str, settings: dict[str, Any]) -> None:
    """The file, or none: one of an earlier export would contradict config.json."""
    if settings:
        with open(file, "w", encoding="utf-8") as stream:
            json.dump(settings, stream, indent=4)
    elif os.path.exists(file):
        os.remove(file)


@contextlib.contextmanager
def _unquantized(model: Any, settings: dict[str, Any]) -> Iterator[None]:
    """The model as transformers may write it: no quantizer that refuses, and the settings of the export."""
    quantizer, config = model.hf_quantizer, model.config
    before = config.__dict__.pop("quantization_config", None)
    model.hf_quantizer = None
    if settings:
        config.quantization_config = settings
    try:
        yield
    finally:
        model.hf_quantizer = quantizer
        config.__dict__.pop("quantization_config", None)
        if before is not None:
            config.quantization_config = before
