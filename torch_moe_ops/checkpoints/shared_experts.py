"""The shared experts of a layer in a checkpoint: the mlp that every token goes through, beside the routed experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch_moe_ops.checkpoints.index import CheckpointIndex
from torch_moe_ops.checkpoints.layer import LayerSource
from torch_moe_ops.checkpoints.naming import ExpertLayer, NameConflict
from torch_moe_ops.files.errors import CheckpointError
from torch_moe_ops.files.tensor_reader import TensorReader
from torch_moe_ops.weights.raw_weights import RawWeights
from torch_moe_ops.weights.shared_experts import with_shared_experts

_NAMES = ("shared_experts", "shared_expert")  # beside "experts": DeepSeek, GLM, Kimi; Qwen, Llama 4


def with_shared_of(
    raw: RawWeights,
    index: CheckpointIndex,
    names: ExpertLayer,
    input_scales: bool,
    read: Callable[[LayerSource], RawWeights],
) -> RawWeights:
    """`raw`, the routed experts of a layer, with its shared experts behind them.

    Args:
        names: of the routed experts.
        read: brings an open layer into RawWeights.

    Raises CheckpointError where the layer has none, or some that are not as the routed ones, with the reason.
    """
    where = f"{index.path} layer {names.number}"
    found = _shared_names(index, names, where)
    # The config counts the routed ones.
    config = dataclasses.replace(index.model, num_experts=None)
    with TensorReader(index) as reader:
        shared = read(LayerSource(reader, found, input_scales, config))
    try:
        return with_shared_experts(raw, shared)
    except ValueError as error:
        text = "the shared experts cannot join the routed ones (load them with shared_experts=False)"
        raise CheckpointError(f"{where}: {text}: {error}") from error


def _shared_names(index: CheckpointIndex, names: ExpertLayer, where: str) -> ExpertLayer:
    """Their tensors, as those of expert 0."""
    block = names.root.rpartition(".")[0]
    for name in _NAMES:
        root = f"{block}.{name}"
        found = ExpertLayer(root, names.number, names.mtp)
        try:
            for tensor in index.entries:
                if tensor.startswith(f"{root}."):
                    found.add(f"0.{tensor.removeprefix(f'{root}.')}", tensor)
        except NameConflict as error:
            raise CheckpointError(f"{where}: {error}") from error
        if found.experts:
            return found
    tried = " or ".join(f"{block}.{name}" for name in _NAMES)
    raise CheckpointError(f"{where}: has no shared experts (tensors under {tried})")
