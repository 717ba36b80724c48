"""The experts modules of a transformers model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_moe_ops.transformers.adapters import adapt, adapter_of, is_adapted

_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks)\.(\d+)\.")
# Parameters of an experts module are named after these: the weights, their biases, and scales of FP8 weights.
_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class ExpertsModule:
    """An experts module of a model and the sizes that its parameters had: (num_experts, hidden, intermediate)."""

    name: str
    layer: int
    module: Any  # an nn.Module with the attributes that use_experts_implementation gives it
    sizes: tuple[int, int, int] | None


def find_experts(model: nn.Module) -> list[ExpertsModule]:
    """Every module of the model that goes through the experts interface of transformers, or is made to (adapters.py).

    Raises ValueError for one outside `layers.<n>.` or `blocks.<n>.`, whose experts could not be found in a checkpoint.
    """
    found = []
    for name, module in model.named_modules():
        # Set by transformers.integrations.moe.use_experts_implementation on each instance.
        known = {"is_transposed", "is_concatenated", "has_gate", "has_bias"} <= module.__dict__.keys()
        if not known and not adapt(model.get_submodule(name.rpartition(".")[0]), module):
            continue
        numbers = _LAYER.findall(f"{name}.")
        if not numbers:
            raise ValueError(f"find_experts: module {name} must lie in layers.<n> or blocks.<n>")
        found.append(ExpertsModule(name, int(numbers[-1]), module, _sizes(module)))
    return found


def _sizes(module: Any) -> tuple[int, int, int] | None:
    """From the parameters, which may be on the meta device, or from what was attached before."""
    attached = getattr(module, "moeq_weights", None)
    if attached is not None:
        return attached.sizes  # type: ignore[no-any-return]
    adapter = adapter_of(module)
    if adapter is not None:
        w13, w2 = adapter.weights(module)
        return w13.shape[0], w13.shape[2], w2.shape[2]
    down = getattr(module, "down_proj", None)
    if down is None or down.ndim != 3:
        return None
    experts, rows, columns = down.shape
    if down.dtype == torch.int8:
        columns *= 2  # transformers keeps two 4-bit codes in each
    return (experts, columns, rows) if module.is_transposed else (experts, rows, columns)


def module_activation(module: Any, gate: Tensor, up: Tensor) -> Tensor:
    """What an experts module computes of its first product; `up` alone where it has no gate. [rows, intermediate]."""
    if not module.has_gate:
        return module.act_fn(up)  # type: ignore[no-any-return]
    if is_adapted(module):
        return module.act_fn(gate) * up  # type: ignore[no-any-return]
    halves = torch.cat((gate, up), 1) if module.is_concatenated else torch.stack((gate, up), 2).flatten(1)
    return module._apply_gate(halves)  # type: ignore[no-any-return]


def remove_parameters(module: nn.Module) -> None:
    """Drop the module's own weights and what belongs to them, where they are there."""
    adapter = adapter_of(module)
    for name in adapter.own if adapter is not None else ():
        if hasattr(module, name):
            delattr(module, name)
    for name in [name for name in module._parameters if name.startswith(_WEIGHTS)]:
        del module._parameters[name]
