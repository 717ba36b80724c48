"""attach_experts: the experts of a checkpoint, packed, in place of a model's own."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from torch_moe_ops.checkpoints import load_experts
from torch_moe_ops.checkpoints.index import open_checkpoint
from torch_moe_ops.checkpoints.progress import track
from torch_moe_ops.core.activations import apply_activation
from torch_moe_ops.files.errors import PATH_LENGTH, short
from torch_moe_ops.host_experts.layer import HostExperts
from torch_moe_ops.prepared.prepare import prepare
from torch_moe_ops.prepared.prepared_weights import PreparedWeights
from torch_moe_ops.transformers.act_formats import AUTO, Choices, chosen_act_format, stored_act_format
from torch_moe_ops.transformers.adapters import adapter_of, is_adapted
from torch_moe_ops.transformers.experts import IMPLEMENTATION, ExpertWeights
from torch_moe_ops.transformers.host_experts import HostChoice, HostExpertWeights, host_layer
from torch_moe_ops.transformers.implementation import register_implementation
from torch_moe_ops.transformers.linears import check_linears_loaded
from torch_moe_ops.transformers.modules import ExpertsModule, find_experts, module_activation, remove_parameters
from torch_moe_ops.transformers.routers import replace_routers
from torch_moe_ops.transformers.saving import AttachedExperts
from torch_moe_ops.transformers.shared_experts import block_of, load_with_shared
from torch_moe_ops.weights.quantize_experts import quantized
from torch_moe_ops.weights.raw_weights import RawWeights

Attached = PreparedWeights | HostExperts


def attach_experts(
    model: Any,
    path: str | os.PathLike[str],
    *,
    act_format: str | None = AUTO,
    input_scales: bool = True,
    device: torch.device | str | None = None,
    check_linears: bool = True,
    route: bool = True,
    shared_experts: bool = False,
    host_experts: HostChoice | None = None,
    **prepare_options: Any,
) -> dict[str, Attached]:
    """Give every experts module of a transformers model the quantized experts of a checkpoint.

    Each module's own parameters are removed, its prepared weights become `module.moeq_weights`, and the
    model's experts implementation becomes "moeq". The other weights of the model stay as they are. Layer by
    layer: peak memory is the model, what was attached so far and one layer.

    Args:
        model: a PreTrainedModel whose experts go through the experts interface of transformers 5.
        path: a checkpoint that `load_experts` reads, in any of its formats.
        act_format: as in `prepare`, or "auto": the checkpoint's where a backend multiplies it natively on the
            device, else "none". A line of the log (INFO) says what was chosen.
        input_scales: as in `load_experts`.
        device: None: where the parameters beside the experts (the router's) are.
        check_linears: compare quantized linears outside the experts with what the model has for them: transformers
            does not load all of their formats, and leaves what it cannot load random.
        route: let routers choose by `moeq::route` in inference on a GPU, where that does what they do.
        shared_experts: run shared experts in the call of the routed ones, where the checkpoint has both in one scheme
            (a line of the log, INFO, says where not). Their sum is then rounded once; such a model is not saved by
            `save_pretrained`.
        host_experts: how many experts of every layer lie in host memory and run on the CPU, or which; or either by the
            number of a layer (others have none there). The layers are then `HostExperts`, for inference alone, which
            stay on their device and cannot be saved. Not with shared_experts.
        prepare_options: given to `prepare` for every layer (`backend`, `accuracy`, ...), with host_experts to
            `HostExperts` (`max_tokens` as well).

    Returns: the prepared weights by module name, or the HostExperts, for `explain`.
    Raises:
        ValueError: no experts modules; a layer that the checkpoint lacks; sizes, gating or activation of a
            module that differ from the checkpoint's; experts with a norm of their own, which no op applies;
            linears that are not what the checkpoint holds.
    """
    modules = find_experts(model)
    if not modules:
        raise ValueError(
            f"attach_experts: model must have experts modules with the experts interface of transformers 5, "
            f"got {type(model).__name__} without"
        )
    if check_linears:
        check_linears_loaded(model, open_checkpoint(path))
    options: dict[str, Any] = {"act_format": act_format, "input_scales": input_scales, "device": device, "route": route}
    options["shared_experts"] = shared_experts
    options["host_experts"] = host_experts
    attached = attach_to(model, modules, path, **options, **prepare_options)
    model.hf_quantizer = AttachedExperts()  # whatever it was: it would save a model without experts
    return attached


def attach_to(
    model: Any,
    modules: list[ExpertsModule],
    path: str | os.PathLike[str],
    *,
    act_format: str | None = AUTO,
    input_scales: bool = True,
    device: torch.device | str | None = None,
    scheme: str | None = None,
    route: bool = True,
    shared_experts: bool = False,
    host_experts: HostChoice | None = None,
    **prepare_options: Any,
) -> dict[str, Attached]:
    """attach_experts for modules that were found before; `scheme` quantizes experts that a checkpoint does not."""
    if shared_experts and host_experts is not None:
        raise ValueError("attach_experts: shared_experts must be False with host_experts, got True")
    register_implementation()
    prepare_options = known_dtype(model) | prepare_options
    attached, choices = {}, Choices()
    quantization = open_checkpoint(path).model.quantization
    for found in modules:
        block_of(model, found)
    for found in track(modules, "experts"):
        target = torch.device(device) if device is not None else _device_beside(model, found.name)
        joined = load_with_shared(model, found, path, input_scales) if shared_experts else None
        raw = joined[0] if joined else load_experts(path, layer=found.layer, input_scales=input_scales)
        if scheme is not None:
            raw = quantized(raw, scheme)
        stored = stored_act_format(raw, quantization)
        asked = {name: value for name, value in prepare_options.items() if name != "max_tokens"}
        act = chosen_act_format(raw, stored, target, asked) if act_format == AUTO else act_format
        w = attach_raw(found, raw, target, host_experts=host_experts, act_format=act, **prepare_options)
        attached[found.name] = w
        if joined:
            joined[1].replace(found.module.moeq_weights)
        choices.add(stored, w if isinstance(w, PreparedWeights) else w.parts[0])
    set_implementation(model, modules)
    if route:
        replace_routers(model, modules)
    if act_format == AUTO:
        choices.log(os.fspath(path))
    return attached


def known_dtype(model: Any) -> dict[str, Any]:
    """`dtype` of `prepare` for a float16 model, whose hidden states not every backend takes.

    One in float32 is not told: it may be cast later, and on a GPU only the slowest backend takes it as it is.
    """
    return {"dtype": torch.float16} if getattr(model, "dtype", None) == torch.float16 else {}


def set_implementation(model: Any, modules: list[ExpertsModule]) -> None:
    """Let the model's experts interface, where it has one, run packed experts."""
    if not all(is_adapted(found.module) for found in modules):
        model.set_experts_implementation(IMPLEMENTATION)


def attach_raw(
    found: ExpertsModule,
    raw: RawWeights,
    device: torch.device,
    *,
    host_experts: HostChoice | None = None,
    **prepare_options: Any,
) -> Attached:
    """Prepare one layer and give it to its module, whose own parameters are dropped once everything fits."""
    _check_sizes(found, raw)
    adapter = adapter_of(found.module)
    own_options = {} if adapter is None else adapter.prepare_options
    w: Attached
    holder: nn.Module
    if host_experts is None:
        w = prepare(raw, device=device, **own_options, **prepare_options)
        holder, part = ExpertWeights(w), w
    else:
        w = host_layer(raw, found.layer, host_experts, device, **own_options, **prepare_options)
        holder, part = HostExpertWeights(w), w.parts[0]
    _check_activation(found, part)
    remove_parameters(found.module)
    found.module.moeq_weights = holder
    return w


def _device_beside(model: nn.Module, name: str) -> torch.device:
    """Device of the nearest parameter outside the experts module: its router's, as a rule."""
    inside, parent = f"{name}.", name
    while parent:
        parent = parent.rpartition(".")[0]
        for other, parameter in model.get_submodule(parent).named_parameters(prefix=parent):
            if not other.startswith(inside):
                if parameter.device.type == "meta":
                    raise ValueError(f"attach_experts: {other} must be loaded, got it on the meta device (offloaded?)")
                return parameter.device
    raise ValueError(f"attach_experts: device must be given, as the model has no parameters beside {name}")


def _check_sizes(found: ExpertsModule, raw: RawWeights) -> None:
    module = found.module
    if getattr(module, "has_post_expert_norm", False):
        raise ValueError(f"attach_experts: {found.name} must have no norm after each expert: no op applies one")
    _require(
        found, raw, "gating", "gated" if module.has_gate else "not gated", "gated" if raw.is_gated else "not gated"
    )
    routed = raw.num_experts - raw.num_shared_experts
    if found.sizes is not None:
        names = "num_experts, hidden_size, intermediate_size"
        got = (routed, raw.hidden_size, raw.intermediate_size)
        _require(found, raw, names, found.sizes, got)
    # Under expert parallelism the module counts this rank's experts only; a checkpoint has all of them.
    _require(found, raw, "num_experts", getattr(module, "num_experts", routed), routed)


def _require(found: ExpertsModule, raw: RawWeights, what: str, wanted: Any, got: Any) -> None:
    if wanted != got:
        where = short(raw.source, PATH_LENGTH)
        raise ValueError(
            f"attach_experts: {what} of {found.name} must be {wanted} as in the model, got {got} ({where})"
        )


@torch.no_grad()
def _check_activation(found: ExpertsModule, w: PreparedWeights) -> None:
    """Compare the prepared activation with what the module itself computes.

    hidden_act in a config does not tell everything: gpt-oss says "silu", other models clamp.
    """
    values = torch.linspace(-12.0, 12.0, 2 * w.intermediate_size, device=w.device, dtype=torch.float32)
    order = torch.randperm(2 * w.intermediate_size, generator=torch.Generator().manual_seed(0))
    gate, up = values[order.to(w.device)][None].chunk(2, dim=1)
    constants = (w.swiglu_alpha, w.swiglu_beta, w.swiglu_limit)
    theirs = module_activation(found.module, gate, up)
    ours = apply_activation(w.activation, gate if found.module.has_gate else None, up, *constants)
    if not torch.allclose(theirs, ours, rtol=1e-4, atol=1e-4):
        worst = (theirs - ours).abs().max().item()
        raise ValueError(
            f"attach_experts: activation must be the one of {found.name}, got {w.activation!r} with constants "
            f"{constants}, which differs by up to {worst:.3g}. Give activation= and its constants"
        )
