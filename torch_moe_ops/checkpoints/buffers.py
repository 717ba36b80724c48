"""The tensors of one layer, allocated once and filled expert by expert."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_moe_ops.checkpoints.fields import Fields
from torch_moe_ops.checkpoints.layer import LayerSource
from torch_moe_ops.checkpoints.linear import Linear
from torch_moe_ops.core.mapped_memory import mapped_empty

_MIDDLE = {torch.uint8: 8, torch.int8: 0}


class LayerBuffers:
    """[num_experts, ...] tensors by name, allocated when the first expert shows their shapes.

    Peak memory of a load is then the result plus one projection. On the meta device nothing is kept, but every
    check is made: `inspect` uses that.

    is_symmetric: whether every zero point so far was the middle of its grid, and can be left out.
    """

    def __init__(self, num_experts: int, device: torch.device | str) -> None:
        self._num_experts = num_experts
        self._device = device
        self._tensors: dict[str, Tensor] = {}
        self.is_symmetric = True

    def put(self, name: str, linear: Linear, expert: int, pieces: list[Tensor]) -> None:
        """Join `pieces` along their first dimension and store them as expert `expert` of `name`."""
        rows = sum(piece.shape[0] for piece in pieces)
        shape, dtype = (rows, *pieces[0].shape[1:]), pieces[0].dtype
        if name not in self._tensors:
            self._tensors[name] = mapped_empty((self._num_experts, *shape), dtype, torch.device(self._device))
        target = self._tensors[name]
        alike = all(piece.shape[1:] == target.shape[2:] and piece.dtype == target.dtype for piece in pieces)
        if shape[0] != target.shape[1] or not alike:
            like = f"agree with shape {tuple(target.shape[1:])} and {target.dtype} of expert 0"
            got = ", ".join(f"{tuple(piece.shape)} {piece.dtype}" for piece in pieces)
            raise linear.fail(linear.weight_part, f"{like} ({name})", got)
        start = 0
        for piece in pieces:
            target[expert, start : start + piece.shape[0]].copy_(piece)
            start += piece.shape[0]

    def pop(self, name: str) -> Tensor | None:
        return self._tensors.pop(name, None)


def fill(source: LayerSource, expert: int, buffers: LayerBuffers) -> None:
    """Read one expert and store it."""
    first = [item for projection in source.projections[:-1] for item in source.read(expert, projection)]
    _check_halves(first)
    _store("13", expert, first, buffers)
    del first
    _store("2", expert, source.read(expert, "down"), buffers)


def _store(which: str, expert: int, items: list[tuple[Linear, Fields]], buffers: LayerBuffers) -> None:
    linear = items[0][0]
    for key in ("weight", "scale", "zero_point", "bias"):
        pieces = [fields[key] for _, fields in items if key in fields]
        if pieces:
            buffers.put(f"w{which}" if key == "weight" else f"w{which}_{key}", linear, expert, pieces)
    zero_points = (fields["zero_point"] for _, fields in items if "zero_point" in fields)
    buffers.is_symmetric &= all(bool((z == _MIDDLE[z.dtype]).all()) for z in zero_points)
    scale_2 = [fields["scale_2"].reshape(1) for _, fields in items if "scale_2" in fields]
    if scale_2:
        buffers.put(f"w{which}_scale_2", linear, expert, scale_2)
    inputs = [fields["input_scale"] for _, fields in items if "input_scale" in fields]
    if inputs:
        # Gate and up see the same input: the larger scale covers what either calibration saw.
        buffers.put(f"a{which}_input_scale", linear, expert, [torch.stack(inputs).amax().reshape(1)])


def _check_halves(items: list[tuple[Linear, Fields]]) -> None:
    if len(items) != 2:
        return
    (_, gate), (linear, up) = items
    if gate["weight"].shape != up["weight"].shape:
        got = tuple(up["weight"].shape)
        raise linear.fail(linear.weight_part, f"have shape {tuple(gate['weight'].shape)} like gate", got)
    if gate.keys() != up.keys():
        key = min(gate.keys() ^ up.keys())
        raise linear.fail(linear.weight_part, f"have a {key} exactly where gate has one", sorted(up))
