"""Layers of a transformers model with some of their experts on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from torch_moe_ops.host_experts.layer import HostExperts
from torch_moe_ops.weights.raw_weights import RawWeights

# How many experts of each layer, or which, or the like for each layer by its number.
HostChoice = int | Sequence[int] | Mapping[int, int | Sequence[int]]


class HostExpertWeights(nn.Module):
    """Holds the experts of one layer, some of which lie on the host, for the forward of an experts module.

    They stay where they were attached, and are in no state_dict: they cannot be saved, exported, or adapted.
    """

    def __init__(self, layer: HostExperts) -> None:
        super().__init__()
        self.layer = layer

    @property
    def sizes(self) -> tuple[int, int, int]:
        """num_experts, hidden_size, intermediate_size."""
        return self.layer.num_experts, self.layer.hidden_size, self.layer.intermediate_size

    @property
    def prepared(self) -> NoReturn:
        raise ValueError("experts must all lie on one device to be saved, exported or adapted, got some on the host")

    def run(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        return self.layer(hidden_states, topk_ids, topk_weights)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HostExpertWeights:
        device = fn(torch.empty(0, device=self.layer.device)).device
        if device != self.layer.device:
            text = f"stay on {self.layer.device}, where they were attached with some of them on the host"
            raise ValueError(f"experts must {text}: the model cannot be moved to {device}")
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Nothing: what a loader asks of a model while it is made. Saving a model asks `prepared`, which refuses."""

    def extra_repr(self) -> str:
        split = self.layer.split
        return f"{len(split.device)} experts on {self.layer.device}, {len(split.host)} on the host"


def host_layer(
    raw: RawWeights, layer: int, host_experts: HostChoice, device: torch.device, **prepare_options: Any
) -> HostExperts:
    """One layer, divided as `attach_experts` is asked; a layer that a mapping does not name lies on the device."""
    choice = host_experts.get(layer, 0) if isinstance(host_experts, Mapping) else host_experts
    return HostExperts(raw, choice, device=device, **prepare_options)
