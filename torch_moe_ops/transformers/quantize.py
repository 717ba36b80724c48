"""quantize_model: the experts of a model that is in memory, quantized where they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.checkpoints.model_config import activation_fields, parse_config
from torch_moe_ops.checkpoints.progress import track
from torch_moe_ops.core.schemes import FLOATS
from torch_moe_ops.transformers.adapters import adapter_of
from torch_moe_ops.transformers.attach import Attached, attach_raw, known_dtype, set_implementation
from torch_moe_ops.transformers.experts import HOLDER
from torch_moe_ops.transformers.implementation import register_implementation
from torch_moe_ops.transformers.modules import ExpertsModule, find_experts
from torch_moe_ops.transformers.routers import replace_routers
from torch_moe_ops.transformers.saving import AttachedExperts
from torch_moe_ops.weights.quantize_experts import quantize_experts
from torch_moe_ops.weights.raw_weights import RawWeights


def quantize_model(
    model: Any,
    scheme: str = "nvfp4",
    *,
    act_format: str = "none",
    route: bool = True,
    device: torch.device | str | None = None,
    **prepare_options: Any,
) -> dict[str, Attached]:
    """Quantize the experts of a transformers model and run them through torch.ops.moeq.

    Layer by layer, on the device where each is: the parameters of an experts module give way to its packed
    weights. Biases, interleaved rows and transposed weights are taken as the module says. Everything beside the
    experts stays as it is. Peak memory is the model and two layers.

    Args:
        model: a PreTrainedModel whose experts go through the experts interface of transformers 5.
        scheme: as in `quantize_experts`; "none" keeps the weights as they are.
        act_format: as in `prepare`. There is no calibration: activations are scaled token by token where the format
            has scales.
        route: as in `attach_experts`.
        device: where the packed experts, or those that are not on the host, go; None: where each layer's were.
        prepare_options: given to `prepare` for every layer, and host_experts as in `attach_experts`.

    Returns: the prepared weights by module name, or the HostExperts, for `explain`.
    Raises:
        ValueError: no experts modules; experts that are quantized already, or not loaded; an activation that the
            library does not have, or sizes that the scheme cannot divide. Layers before that one are done.
    """
    modules = find_experts(model)
    if not modules:
        raise ValueError(
            f"quantize_model: model must have experts modules with the experts interface of transformers 5, "
            f"got {type(model).__name__} without"
        )
    for found in modules:
        _check_weights(found)
    register_implementation()
    prepare_options = known_dtype(model) | prepare_options
    config = parse_config(model.config.to_dict(), {})
    done = {}
    for found in track(modules, "quantizing experts"):
        fields = activation_fields(config, is_gated=found.module.has_gate, is_gpt_oss=config.is_gpt_oss)
        raw = _quantized(found, scheme, fields)
        target = raw.device if device is None else torch.device(device)
        done[found.name] = attach_raw(found, raw, target, act_format=act_format, **prepare_options)
    set_implementation(model, modules)
    if route:
        replace_routers(model, modules)
    model.hf_quantizer = AttachedExperts()
    return done


def _check_weights(found: ExpertsModule) -> None:
    weights = [p for p in _own_weights(found.module) if p.ndim == 3]
    if len(weights) != 2:
        raise ValueError(f"quantize_model: {found.name} must hold two weights of all experts, got {len(weights)}")
    for weight in weights:
        if weight.is_meta or weight.dtype not in FLOATS:
            got = "them on the meta device (offloaded?)" if weight.is_meta else f"dtype {weight.dtype}"
            raise ValueError(f"quantize_model: weights of {found.name} must be loaded floats, got {got}")


def _own_weights(module: Any) -> list[Tensor]:
    """None where packed experts have taken their place."""
    adapter = adapter_of(module)
    if adapter is None:
        return [p for p in module._parameters.values() if p is not None]
    return [] if hasattr(module, HOLDER) else list(adapter.weights(module))


@torch.no_grad()
def _quantized(found: ExpertsModule, scheme: str, fields: dict[str, Any]) -> RawWeights:
    module = found.module
    adapter = adapter_of(module)
    first = "gate_up_proj" if module.has_gate else "up_proj"
    if adapter is not None:
        w13, w2 = adapter.weights(module)
    else:
        w13, w2 = getattr(module, first), module.down_proj
        if module.is_transposed:
            w13, w2 = w13.mT, w2.mT
    biases = {}
    if module.has_bias:
        biases["w13_bias"] = _gate_then_up(module, getattr(module, f"{first}_bias").detach())
        biases["w2_bias"] = module.down_proj_bias.detach()
    w13, w2 = _gate_then_up(module, w13.detach()).contiguous(), w2.detach().contiguous()
    return quantize_experts(w13, w2, scheme, source=found.name, **biases, **fields)


def _gate_then_up(module: Any, rows: Tensor) -> Tensor:
    """Rows (dimension 1) of gate and up, one after the other."""
    if not module.has_gate or module.is_concatenated:
        return rows
    return torch.cat((rows[:, 0::2], rows[:, 1::2]), dim=1)
