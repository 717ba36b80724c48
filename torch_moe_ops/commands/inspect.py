"""What a checkpoint holds, layer by layer: format, shapes, the backends that can run it, and problems."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from torch_moe_ops.checkpoints.index import CheckpointIndex, open_checkpoint
from torch_moe_ops.checkpoints.load import describe_layer
from torch_moe_ops.checkpoints.naming import ExpertLayer, select_layer
from torch_moe_ops.files.errors import CheckpointError
from torch_moe_ops.prepared.explaining import explain
from torch_moe_ops.weights.raw_weights import RawWeights


class Inspection:
    """Lines about a checkpoint, made one layer at a time.

    Args:
        path: as load_experts takes it.
        layer: only this one; None: all, prediction layers included.
        quick: read headers and the first expert of each layer only; else every tensor is read and checked.
        backends: also say which backends can run the layer on this machine.

    Raises:
        CheckpointError: where the path cannot be opened; the text of load_experts where there is no such layer.
    """

    def __init__(
        self, path: str | os.PathLike[str], layer: int | None = None, *, quick: bool = False, backends: bool = True
    ) -> None:
        self.index: CheckpointIndex = open_checkpoint(path)
        self.problems = 0
        self._quick = quick
        self._backends = backends
        self._explained: dict[str, int] = {}
        self._layers = [names for names in self.index.layers if layer is None or names.number == layer]
        if layer is not None and not self._layers:
            select_layer(self.index.layers, layer, mtp=True, path=self.index.path)

    def lines(self) -> Iterator[str]:
        """The report. `problems` counts the layers that cannot be loaded, once all lines are taken."""
        files = len({entry.file for entry in self.index.entries.values()})
        yield f"{self.index.path}: {_count(len(self.index.entries), 'tensor')} in {_count(files, 'file')}"
        if not self._layers:
            self.problems += 1
            yield "problem: no layer has experts"
        for names in self._layers:
            yield from self._layer(names)

    def _layer(self, names: ExpertLayer) -> Iterator[str]:
        title = f"layer {names.number}{' (multi-token prediction)' if names.mtp else ''}"
        try:
            format_name, raw = describe_layer(self.index, names, quick=self._quick)
        except CheckpointError as error:
            self.problems += 1
            yield f"{title}: {names.root}"
            yield f"  problem: {error}"
            return
        yield f"{title}: {format_name} -> scheme {raw.scheme}"
        yield f"  {_sizes(raw)}"
        for name, tensor in raw.tensors().items():
            yield f"  {name:<16}{str(tensor.dtype).removeprefix('torch.'):<15}{tuple(tensor.shape)}"
        if self._backends:
            yield from self._explain(names, raw)

    def _explain(self, names: ExpertLayer, raw: RawWeights) -> Iterator[str]:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        text = str(explain(raw, device=device))
        if text in self._explained:
            yield f"  backends: as layer {self._explained[text]}"
            return
        self._explained[text] = names.number
        yield from (f"  {line}" for line in text.splitlines())


def _sizes(raw: RawWeights) -> str:
    constants = {"alpha": raw.swiglu_alpha, "beta": raw.swiglu_beta, "limit": raw.swiglu_limit}
    given = ", ".join(f"{name} {value:g}" for name, value in constants.items() if value is not None)
    activation = raw.activation or "not known"
    return (
        f"{_count(raw.num_experts, 'expert')}, hidden_size {raw.hidden_size}, "
        f"intermediate_size {raw.intermediate_size}, {'gated' if raw.is_gated else 'not gated'}, "
        f"activation {activation}{f' ({given})' if given else ''}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
