"""A model with packed experts as the tensors and settings of a checkpoint that other tools read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.checkpoints.naming import ExpertLayer, find_layers
from torch_moe_ops.checkpoints.writing import WrittenFormat, format_of
from torch_moe_ops.checkpoints.writing_config import hf_quant_config, quantization_config
from torch_moe_ops.checkpoints.writing_layer import layer_tensors
from torch_moe_ops.prepared.restoring import restored_views
from torch_moe_ops.transformers.adapters import adapter_of, is_adapted
from torch_moe_ops.transformers.dequantize import own_conversions
from torch_moe_ops.transformers.experts import HOLDER
from torch_moe_ops.transformers.linears import stored_dtype
from torch_moe_ops.transformers.modules import ExpertsModule, find_experts
from torch_moe_ops.weights.raw_weights import RawWeights


@dataclass
class Export:
    """What `save_pretrained` writes.

    Args:
        tensors: by their names in the files.
        quantization: quantization_config of config.json, {} where nothing is quantized.
        hf_quant_config: the file of that name, {} where there is none.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    quantization: dict[str, Any] = field(default_factory=dict)
    hf_quant_config: dict[str, Any] = field(default_factory=dict)


@torch.no_grad()
def export_model(model: Any) -> Export:
    """The tensors of a model in the format that its experts have.

    Experts are written as they are, everything else unquantized, as it is in the model.

    Raises: ValueError, naming the reason, for what cannot be written.
    """
    modules = find_experts(model)
    _check(model, modules)
    # Experts under their own names and shapes, without data: transformers says what its files call them.
    tensors = _beside_experts(model)
    raws = {found.name: _raw(found) for found in modules}
    meta = {name: t for found in modules for name, t in _parameters(found, raws[found.name]).items()}
    named = _as_in_files(model, tensors | meta)
    unquantized = {raw.scheme for raw in raws.values()} == {"none"}
    if unquantized:
        return Export({name: t.cpu() for name, t in named.items()})
    experts = {name for name, t in named.items() if t.is_meta}
    others = {name: t for name, t in named.items() if name not in experts}
    layers = _layers(model, experts, modules)
    # One tensor for all experts is what the tools write for gpt-oss alone; they split Llama 4's experts.
    fused = all(found.module.is_transposed and not is_adapted(found.module) for found in modules)
    form = _common_format({found.name: (raws[found.name], layers[found.layer]) for found in modules}, fused)
    written = dict(others)
    for found in modules:
        how = {"transposed": fused, "interleaved": not found.module.is_concatenated}
        written |= layer_tensors(raws.pop(found.name), layers[found.layer], form, **how)
    ignored = sorted(name.removesuffix(".weight") for name, t in others.items() if _is_linear(name, t))
    return Export(written, quantization_config(form, ignored), hf_quant_config(form, ignored))


def _is_linear(name: str, tensor: Tensor) -> bool:
    return tensor.ndim == 2 and name.endswith(".weight")


def _check(model: Any, modules: list[ExpertsModule]) -> None:
    for found in modules:
        if not hasattr(found.module, HOLDER):
            raise ValueError(f"save_pretrained: {found.name} must hold packed experts like others, got its own weights")
        adapter = adapter_of(found.module)
        w = getattr(found.module, HOLDER).prepared
        if adapter is not None and adapter.parameters is not None and w.scheme != "none":
            raise ValueError(
                f"save_pretrained: {found.name} must be of a class whose packed experts other tools have names for, "
                f"got {adapter.experts} (torch.save and state_dict keep them)"
            )
        if w.num_local_experts != w.num_experts:
            raise ValueError(
                f"save_pretrained: {found.name} must hold all {w.num_experts} experts, got the "
                f"{w.num_local_experts} of one rank"
            )
        if w.device.type == "meta":
            raise ValueError(f"save_pretrained: experts of {found.name} must be loaded, got them on the meta device")
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"save_pretrained: {name} must be loaded, got it on the meta device (offloaded?)")
        if stored_dtype(parameter.dtype):
            raise ValueError(
                f"save_pretrained: {name} must be a float, got {parameter.dtype}: another quantizer's weights "
                "cannot be written beside packed experts"
            )


def _beside_experts(model: Any) -> dict[str, Tensor]:
    return {name: t for name, t in model.state_dict().items() if HOLDER not in name.split(".")}


def _raw(found: ExpertsModule) -> RawWeights:
    try:
        return restored_views(getattr(found.module, HOLDER).prepared)
    except ValueError as error:
        raise ValueError(f"save_pretrained: {found.name} cannot be written: {error}") from error


def _parameters(found: ExpertsModule, raw: RawWeights) -> dict[str, Tensor]:
    """What the module's own parameters were: unquantized experts themselves, of others the shapes."""
    module = found.module
    adapter = adapter_of(module)
    if adapter is not None and adapter.parameters is not None:  # unquantized, as `_check` has seen
        return {f"{found.name}.{own}": tensor for own, tensor in adapter.parameters(raw.w13, raw.w2).items()}
    first = "gate_up_proj" if module.has_gate else "up_proj"
    tensors = {}
    for name, own in (("w13", first), ("w2", "down_proj")):
        weight, bias = getattr(raw, name), getattr(raw, f"{name}_bias")
        k = raw.hidden_size if name == "w13" else raw.intermediate_size
        if raw.scheme != "none":
            weight = torch.empty(weight.shape[0], weight.shape[1], k, device="meta")
            bias = None if bias is None else torch.empty(bias.shape, device="meta")
        if name == "w13" and module.has_gate and not module.is_concatenated:
            weight, bias = (None if t is None else _alternating(t) for t in (weight, bias))
        tensors[f"{found.name}.{own}"] = weight.mT.contiguous() if module.is_transposed else weight
        if bias is not None:
            tensors[f"{found.name}.{own}_bias"] = bias
    return tensors


def _alternating(rows: Tensor) -> Tensor:
    """[gate; up] along dimension 1 -> g0, u0, g1, u1, ..."""
    return torch.stack(rows.chunk(2, dim=1), 2).flatten(1, 2)


def _as_in_files(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names and shapes as transformers' own `save_pretrained` writes them."""
    from transformers.core_model_loading import revert_weight_conversion

    loaded = model.__dict__.pop("_weight_conversions", None)
    own = None if loaded is None else own_conversions(loaded)
    try:
        if own is not None:
            model._weight_conversions = own
        return revert_weight_conversion(model, tensors)
    finally:
        model.__dict__.pop("_weight_conversions", None)
        if loaded is not None:
            model._weight_conversions = loaded


def _layers(model: Any, names: set[str], modules: list[ExpertsModule]) -> dict[int, ExpertLayer]:
    found = find_layers(sorted(names))
    layers = {layer.number: layer for layer in found}
    unknown = [name for layer in found for name in layer.unknown]
    lost = sorted({module.layer for module in modules} - layers.keys())
    if unknown or lost or not len(layers) == len(found) == len(modules):
        shown = (unknown or sorted(names))[0]
        raise ValueError(
            f"save_pretrained: {type(model).__name__} must keep the experts of a layer in one place under names "
            f"'...experts.<e>.<projection>' or '...experts.<projection>' in its files, got {shown}"
        )
    return layers


def _common_format(layers: dict[str, tuple[RawWeights, ExpertLayer]], fused: bool) -> WrittenFormat:
    """The one format of all layers: config files describe no other kind of checkpoint here."""
    first: tuple[str, WrittenFormat] | None = None
    for name, (raw, names) in layers.items():
        try:
            form = format_of(raw, gpt_oss=names.is_fused and fused)
        except ValueError as error:
            raise ValueError(f"save_pretrained: {name} cannot be written: {error}") from error
        if first is None:
            first = name, form
        elif form != first[1]:
            raise ValueError(
                f"save_pretrained: all layers must have one format, got {first[1].text} of {first[0]} and {form.text} "
                f"of {name}"
            )
    assert first is not None  # there are modules
    return first[1]
