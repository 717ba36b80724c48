"""Layers with experts on the host, by the names under which `moeq::host_experts` is asked for them.

An op takes no objects, and weights that lie on another device than the hidden states would keep compilers from making
a CUDA graph of it: so a layer says a name, as a process group does.
"""

from __future__ import annotations

import itertools
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from torch_moe_ops.core.check import fail


class HostLayer(Protocol):
    """What the op asks of a layer."""

    device: torch.device
    hidden_size: int
    hidden_dtypes: tuple[torch.dtype, ...]  # what both of its parts take

    def run(self, hidden_states: Tensor, places: Tensor, topk_weights: Tensor, out_dtype: torch.dtype) -> Tensor:
        """[num_tokens, hidden_size] of checked arguments, of one token at least, contiguous, on the layer's device."""
        ...


_LAYERS: WeakValueDictionary[str, HostLayer] = WeakValueDictionary()
_numbers = itertools.count()


def name_layer(layer: HostLayer) -> str:
    """A name for as long as the layer lives; of this process alone, and never given again."""
    name = f"layer_{next(_numbers)}"
    _LAYERS[name] = layer
    return name


def layer_named(op: str, name: str) -> HostLayer:
    """Raises RuntimeError for a name that no layer of this process has."""
    layer = _LAYERS.get(name)
    if layer is None:
        fail(op, "layer", "be the name of a HostExperts of this process, which still exists", name)
    return layer
