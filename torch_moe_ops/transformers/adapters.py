"""MoE blocks of transformers that keep the experts interface out of reach: given one, class by class.

An adapted module has the attributes that the interface gives others, and says where its own weights are. Its class gets
a forward that runs packed experts where a module holds some, and is what it was for all others.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torch_moe_ops.transformers.adapted_forwards import dbrx, jetmoe, llama4
from torch_moe_ops.transformers.experts import HOLDER

_ADAPTER = "moeq_adapter"


@dataclass(frozen=True)
class Adapter:
    """How a class of experts is run packed.

    Args:
        module: transformers' module that the classes are in.
        experts: name of the class whose modules hold the weights of all experts.
        runs: name of the class that gets `forward`: that of the experts, or of the block around them.
        forward: of such a module whose experts are packed.
        weights: gate and up rows [num_experts, 2 * intermediate, hidden], and [num_experts, hidden, intermediate].
        own: names of parameters or modules that packed experts take the place of.
        activation: name of the module that computes the activation.
        is_transposed: as use_experts_implementation says it of modules that have the interface.
        prepare_options: options of `prepare` that the module asks for, beside those that a caller gives.
        parameters: the way back from `weights`: what the module's own parameters were, by name. None: gate_up_proj and
            down_proj. `save_pretrained` writes others unquantized only, as other tools have no names for their codes.
    """

    module: str
    experts: str
    runs: str
    forward: Callable[..., Any]
    weights: Callable[[Any], tuple[Tensor, Tensor]]
    own: tuple[str, ...]
    activation: str
    is_transposed: bool = False
    prepare_options: dict[str, Any] = field(default_factory=dict)
    parameters: Callable[[Tensor, Tensor], dict[str, Tensor]] | None = None

    def __reduce__(self) -> tuple[Callable[[str], Adapter], tuple[str]]:
        """A model that is unpickled where none was adapted before runs too."""
        return _adapter_named, (self.experts,)


def _llama4_weights(experts: Any) -> tuple[Tensor, Tensor]:
    return experts.gate_up_proj.mT, experts.down_proj.mT


def _dbrx_weights(experts: Any) -> tuple[Tensor, Tensor]:
    """Of matrices that have the rows of all experts below each other; the second one is not transposed."""
    mlp = experts.mlp
    gate, up, down = (w.unflatten(0, (experts.num_experts, -1)) for w in (mlp.w1, mlp.v1, mlp.w2))
    return torch.cat((gate, up), 1), down.mT


def _dbrx_parameters(w13: Tensor, w2: Tensor) -> dict[str, Tensor]:
    matrices = zip(("w1", "v1", "w2"), (*w13.chunk(2, 1), w2.mT), strict=True)
    return {f"mlp.{name}": matrix.flatten(0, 1) for name, matrix in matrices}


def _jetmoe_weights(experts: Any) -> tuple[Tensor, Tensor]:
    return experts.input_linear.weight, experts.output_linear.weight


def _jetmoe_parameters(w13: Tensor, w2: Tensor) -> dict[str, Tensor]:
    return {"input_linear.weight": w13, "output_linear.weight": w2}


# What use_experts_implementation says of modules that have the interface.
_INTERFACE = {"is_concatenated": True, "has_gate": True, "has_bias": False}
_ADAPTERS = {
    adapter.experts: adapter
    for adapter in (
        Adapter(
            module="transformers.models.llama4.modeling_llama4",
            experts="Llama4TextExperts",
            runs="Llama4TextMoe",
            forward=llama4,
            weights=_llama4_weights,
            own=("gate_up_proj", "down_proj"),
            activation="act_fn",
            is_transposed=True,
            prepare_options={"router_weight_on_input": True},
        ),
        Adapter(
            module="transformers.models.dbrx.modeling_dbrx",
            experts="DbrxExperts",
            runs="DbrxExperts",
            forward=dbrx,
            weights=_dbrx_weights,
            parameters=_dbrx_parameters,
            own=("mlp",),
            activation="mlp.activation_fn",
        ),
        Adapter(
            module="transformers.models.jetmoe.modeling_jetmoe",
            experts="JetMoeMoE",
            runs="JetMoeMoE",
            forward=jetmoe,
            weights=_jetmoe_weights,
            parameters=_jetmoe_parameters,
            own=("input_linear", "output_linear"),
            activation="activation",
        ),
    )
}


def adapt(block: nn.Module, experts: Any) -> bool:
    """Make a module of experts one that `find_experts` knows. Whether it is of a class that needs that.

    Args:
        block: the module that `experts` belongs to.

    Raises: ValueError for a routing that the op does not have.
    """
    adapter = _ADAPTERS.get(type(experts).__name__)
    if adapter is None or type(experts).__module__ != adapter.module:
        return False
    if adapter.prepare_options.get("router_weight_on_input") and block.top_k != 1:
        raise ValueError(
            f"{adapter.experts}: num_experts_per_tok must be 1 to multiply tokens by weights, got {block.top_k}"
        )
    if _ADAPTER not in experts.__dict__:
        # Not by __setattr__, which would make the activation a second child.
        activation = functools.reduce(getattr, adapter.activation.split("."), experts)
        said = _INTERFACE | {"is_transposed": adapter.is_transposed, "act_fn": activation}
        experts.__dict__.update(said | {_ADAPTER: adapter})
    _replace_forward(adapter)
    return True


def _adapter_named(experts: str) -> Adapter:
    _replace_forward(_ADAPTERS[experts])
    return _ADAPTERS[experts]


def _replace_forward(adapter: Adapter) -> None:
    kind: Any = getattr(importlib.import_module(adapter.module), adapter.runs)
    theirs = kind.forward
    if hasattr(theirs, "moeq_original"):
        return

    @functools.wraps(theirs)
    def forward(self: Any, *given: Any, **named: Any) -> Any:
        holder = getattr(self if adapter.runs == adapter.experts else self.experts, HOLDER, None)
        return theirs(self, *given, **named) if holder is None else adapter.forward(self, holder, *given, **named)

    forward.moeq_original = theirs  # type: ignore[attr-defined]
    kind.forward = forward


def adapter_of(experts: nn.Module) -> Adapter | None:
    """Of a module that runs without transformers' experts interface; None of others."""
    return experts.__dict__.get(_ADAPTER)


def is_adapted(experts: nn.Module) -> bool:
    """Whether the module runs without transformers' experts interface."""
    return adapter_of(experts) is not None
