"""shard: one rank's share of a layer.

Expert parallelism gives a rank whole experts. Tensor parallelism gives it a part of the intermediate size of every
expert: rows of each half of w13, columns (K) of w2. The sum over ranks of what the shards compute is the whole.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.config.parallel import FusedMoEParallelConfig
from torch_moe_ops.core.schemes import SCHEMES
from torch_moe_ops.weights.raw_weights import RawWeights


def shard(raw: RawWeights, parallel: FusedMoEParallelConfig) -> tuple[RawWeights, int, int]:
    """This rank's share of `raw`, which holds all experts whole.

    Args:
        parallel: sizes and ranks. ep_size ranks take contiguous experts, the first ones one more of a remainder;
            tp_size ranks take equal parts of the intermediate size. w2_bias goes to tp_rank 0 alone, because the
            ranks' outputs are added. A row whose activations get one dynamic scale (fp8, int8, nvfp4) gets one for
            its part on each rank, so the sum is the whole up to that rounding.

    Returns: the share (its tensors may be views of raw's), the global number of experts, and the first expert's id.

    Raises:
        TypeError: parallel is not a FusedMoEParallelConfig.
        ValueError: fewer experts than ranks, shared experts with several ep ranks, or a part of the intermediate size
            that would divide a block, group or tile which shares a scale, or a storage element.
    """
    if not isinstance(parallel, FusedMoEParallelConfig):
        raise TypeError(f"shard: parallel must be a FusedMoEParallelConfig, got {type(parallel).__name__}")
    if raw.num_shared_experts and parallel.ep_size > 1:
        raise ValueError(
            "shard: parallel.ep_size must be 1 where there are shared experts, which every rank needs "
            f"(ExpertParallel.from_raw gives them to each), got {parallel.ep_size}"
        )
    offset, count = parallel.local_experts(raw.num_experts)
    mine = {name: t[offset : offset + count] for name, t in raw.tensors().items() if t.ndim}
    local = dataclasses.replace(raw, **mine)  # type: ignore[arg-type]
    return _shard_intermediate(local, parallel), raw.num_experts, offset


def take_experts(raw: RawWeights, experts: Sequence[int]) -> RawWeights:
    """The experts of `raw` that are named, in this order, in memory of their own. num_shared_experts stays."""
    index = torch.tensor(experts, dtype=torch.int64, device=raw.device)
    mine = {name: _taken(t, index) for name, t in raw.tensors().items() if t.ndim}
    return dataclasses.replace(raw, **mine)  # type: ignore[arg-type]


def _taken(t: Tensor, index: Tensor) -> Tensor:
    # Not every device indexes float8.
    codes = t.view(torch.uint8) if t.element_size() == 1 else t
    return codes[index].view(t.dtype)


def _shard_intermediate(raw: RawWeights, parallel: FusedMoEParallelConfig) -> RawWeights:
    size, ranks = raw.intermediate_size, parallel.tp_size
    if ranks == 1:
        return raw
    unit = unit_of_intermediate(raw)
    if size % (ranks * unit):
        what = f"what shares a scale or a storage element in {raw.scheme} weights spans {unit}"
        raise ValueError(
            f"shard: intermediate_size must be a multiple of tp_size * {unit} = {ranks * unit}, got {size} ({what})"
        )
    mine = part_of_intermediate(raw, *parallel.local_intermediate(size, unit))
    return dataclasses.replace(mine, w2_bias=None) if parallel.tp_rank else mine


def part_of_intermediate(raw: RawWeights, start: int, part: int) -> RawWeights:
    """The values [start, + part) of every expert's intermediate, both multiples of `unit_of_intermediate`.

    With the whole of w2_bias: where results of parts are added, only one of them may keep it.
    """
    changes: dict[str, Any] = {}
    for name, tensor in raw.tensors().items():
        if name in ("w13", "w13_scale", "w13_zero_point", "w13_bias"):
            changes[name] = _rows(raw, name, tensor, start, part)
        elif name in ("w2", "w2_scale", "w2_zero_point"):
            changes[name] = _columns(raw, name, tensor, start, part)
    return dataclasses.replace(raw, **changes)


def unit_of_intermediate(raw: RawWeights) -> int:
    """What a part of the intermediate size must be a multiple of."""
    scheme = SCHEMES[raw.scheme]
    scales = scheme.scales
    shared = 1
    if scales is not None and scales.kind in ("block", "tile"):
        shared = scales.size
    elif scales is not None and scales.kind == "group" and raw.w2_scale is not None:
        groups = raw.w2_scale.shape[2]
        shared = raw.intermediate_size // groups if groups > 1 else 1
    return math.lcm(scheme.size_multiple, scheme.pack, shared)


def _rows(raw: RawWeights, name: str, tensor: Tensor, start: int, part: int) -> Tensor:
    """The same rows of gate and of up, in whatever stands for rows: tiles of them, or none for scales of a half."""
    halves = 2 if raw.is_gated else 1
    rows = tensor.shape[1] // halves
    if name != "w13_bias" and tensor.ndim == 2:
        return tensor  # one scale for all rows of a half or of the matrix
    per_row = -(-raw.intermediate_size // rows)
    kept = tensor.unflatten(1, (halves, rows))[:, :, start // per_row : (start + part) // per_row]
    return kept.flatten(1, 2).contiguous()


def _columns(raw: RawWeights, name: str, tensor: Tensor, start: int, part: int) -> Tensor:
    """A range of K, in storage elements or scales; one scale for all of K is every rank's."""
    if tensor.ndim == 2 or (name != "w2" and tensor.shape[2] == 1):
        return tensor
    per_column = raw.intermediate_size // tensor.shape[2]
    return tensor[:, :, start // per_column : (start + part) // per_column].contiguous()
