"""The experts of one layer as the tensors of a checkpoint, under the names that a model's files have."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torch_moe_ops.checkpoints.fields import Fields
from torch_moe_ops.checkpoints.naming import ExpertLayer
from torch_moe_ops.checkpoints.writing import GPT_OSS, MODELOPT, WrittenFormat, fields_of
from torch_moe_ops.weights.raw_weights import RawWeights

_OWN_NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def layer_tensors(
    raw: RawWeights, names: ExpertLayer, form: WrittenFormat, *, transposed: bool = False, interleaved: bool = False
) -> dict[str, Tensor]:
    """Every tensor of a layer by name, on the CPU in memory of its own.

    Experts that the model's files hold one by one keep those names; so do experts in one tensor of transposed
    matrices (gpt-oss). Other experts in one tensor are written one by one, as the tools do that quantize them.

    Args:
        raw: the layer, quantized.
        names: what the files of the unquantized model call its tensors.
        transposed: where one tensor holds all experts, its matrices are [K, rows].
        interleaved: there gate and up rows alternate.

    Raises: ValueError where the format has no such tensors, or experts are shared, which files hold under other names.
    """
    if raw.num_shared_experts:
        raise ValueError(f"num_shared_experts must be 0 of a layer that is written, got {raw.num_shared_experts}")
    if names.is_fused and transposed:
        return _fused(raw, names, form, interleaved)
    return dict(_one_by_one(raw, names, form))


def _one_by_one(raw: RawWeights, names: ExpertLayer, form: WrittenFormat) -> Iterator[tuple[str, Tensor]]:
    projections = ("gate", "up", "down") if raw.is_gated else ("up", "down")
    for expert in range(raw.num_experts):
        for projection in projections:
            if names.is_fused:
                root = names.root if names.root.endswith(".experts") else f"{names.root}.experts"  # of Granite
                module = f"{root}.{expert}.{_OWN_NAMES[projection]}"
            else:
                module = names.experts[expert][projection]["weight"].removesuffix(".weight")
            for part, tensor in form.parts(fields_of(raw, expert, projection)).items():
                yield f"{module}.{part}", _own(tensor)


def _own(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def _fused(raw: RawWeights, names: ExpertLayer, form: WrittenFormat, interleaved: bool) -> dict[str, Tensor]:
    """All experts in one tensor: gpt-oss as it is released, or as ModelOpt exports it."""
    if form.producer not in (GPT_OSS, MODELOPT) or form.kind == "MXFP8":
        raise ValueError(
            f"{form.text} has no layout for experts that one tensor holds ({names.root}): "
            "only NVFP4, FP8 with a scale per matrix and MXFP4 have"
        )
    tensors: dict[str, Tensor] = {}
    for projection, parts in names.experts[None].items():
        stacked: dict[str, list[Tensor]] = {}
        for expert in range(raw.num_experts):
            for part, tensor in form.parts(_joined(raw, expert, projection, interleaved)).items():
                stacked.setdefault(part, []).append(tensor)
        for part, pieces in stacked.items():
            joined = torch.stack(pieces).cpu()
            if part in ("weight_scale_2", "input_scale") or (part == "weight_scale" and joined.ndim == 1):
                joined = _shared(joined, part, names.root)
            elif joined.ndim == 3:  # the scales and codes of a matrix; blocks of gpt-oss are as they are
                joined = joined if form.producer == GPT_OSS else joined.mT
            weight = parts["weight"]
            tensors[weight if part == "weight" else f"{weight}_{part}"] = joined.contiguous()
    return tensors


def _joined(raw: RawWeights, expert: int, projection: str, interleaved: bool) -> Fields:
    """Fields of a projection as a fused file has it."""
    if projection != "gate_up":
        return fields_of(raw, expert, projection)
    gate, up = (fields_of(raw, expert, half) for half in ("gate", "up"))
    joined: Fields = {}
    for key, value in gate.items():
        if value.ndim == 0 or value.shape[0] == 1:
            if not torch.equal(value, up[key]):
                raise ValueError(f"one {key} must serve gate and up of expert {expert} in a fused layout, got two")
            joined[key] = value
        else:
            joined[key] = torch.stack((value, up[key]), 1 if interleaved else 0).flatten(0, 1)
    return joined


def _shared(values: Tensor, part: str, root: str) -> Tensor:
    if not bool((values == values[0]).all()):
        low, high = values.min().item(), values.max().item()
        raise ValueError(
            f"ModelOpt's fused layout has one {part} for all experts of a layer, got {low:.4g} to {high:.4g} ({root})"
        )
    return values[0]
