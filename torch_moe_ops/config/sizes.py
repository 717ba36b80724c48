"""Whether the tensors of a quant config fit the sizes of a layer."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from torch_moe_ops.config._require import require
from torch_moe_ops.config.descriptors import FusedMoEQuantDesc, GroupShape
from torch_moe_ops.config.formats import fixed_block
from torch_moe_ops.config.quant_fields import QuantFields
from torch_moe_ops.config.weight_scales import fitting_layouts, fitting_shapes
from torch_moe_ops.core.activations import ACTIVATIONS

OWNER = "FusedMoEConfig"


class LayerSizes(Protocol):
    """What FusedMoEConfig says of a layer that a quant config must fit."""

    @property
    def is_gated(self) -> bool: ...
    @property
    def hidden_dim(self) -> int: ...
    @property
    def intermediate_size_per_partition(self) -> int: ...
    @property
    def num_local_experts(self) -> int: ...
    @property
    def activation(self) -> str: ...
    @property
    def has_bias(self) -> bool: ...
    @property
    def device(self) -> torch.device | str: ...


def check_against_sizes(config: LayerSizes, quant: QuantFields) -> None:
    """Raise ValueError that names the first tensor or constant of `quant` which `config` contradicts."""
    halves = 2 if config.is_gated else 1
    inter, hidden = config.intermediate_size_per_partition, config.hidden_dim
    for operand, rows, k in (("w1", halves * inter, hidden), ("w2", hidden, inter)):
        desc: FusedMoEQuantDesc = getattr(quant, f"_{operand}")
        _check_experts(config.num_local_experts, operand, desc)
        if isinstance(desc.scale, Tensor):
            parts = halves if operand == "w1" else 1
            _check_scale(f"{operand}_scale", desc.scale, desc, quant.scale_layout, rows, k, parts)
        for field, name in (("bias", f"{operand}_bias"), ("channel_scale", f"g{operand[1]}_alphas")):
            tensor = getattr(desc, field)
            if tensor is not None and tensor.ndim > 1:
                require(tensor.shape[1] == rows, OWNER, name, f"have {rows} rows", tensor.shape)
    alpha = quant._w1.alpha
    per_half = alpha is not None and alpha.ndim == 2 and alpha.shape[1] == 2
    text = f"have shape ({config.num_local_experts},): {config.activation} has no gate"
    require(config.is_gated or not per_half, OWNER, "g1_alphas", text, None if alpha is None else alpha.shape)
    biased = quant.w1_bias is not None or quant.w2_bias is not None
    require(biased == config.has_bias, OWNER, "has_bias", f"be {biased} like the quant config", config.has_bias)
    _check_constants(config, quant)
    _check_device(config, quant)


def _check_experts(experts: int, operand: str, desc: FusedMoEQuantDesc) -> None:
    for field, tensor in desc.tensors().items():
        name = f"g{operand[1]}_alphas" if field in ("alpha", "channel_scale") else f"{operand}_{field}"
        require(tensor.shape[0] == experts, OWNER, name, f"hold num_local_experts (= {experts})", tensor.shape)


def _check_scale(
    name: str, scale: Tensor, desc: FusedMoEQuantDesc, layout: str | None, rows: int, k: int, halves: int
) -> None:
    shape = desc.shape
    if shape is None or not shape.is_block():
        # Per tensor, per half or per channel; groups of an unstated size say nothing about K.
        per_channel = scale.ndim >= 2 and (shape == GroupShape.PER_TOKEN or max(scale.shape[1:]) > 2)
        ok = not per_channel or rows in scale.shape[1:]
        require(ok, OWNER, name, f"have one scale for each of {rows} rows", scale.shape)
        return
    # Gate and up are tiled separately.
    blocks = (halves * _ceil_div(rows // halves, shape.row), _ceil_div(k, shape.col))
    if fixed_block(desc.dtype) is not None:
        fits = fitting_layouts(scale, *blocks)
        ok = bool(fits) if layout is None else layout in fits
        require(ok, OWNER, name, fitting_shapes(scale, *blocks, layout), scale.shape)
        return
    # Marlin-style integer checkpoints keep groups before rows.
    orders = (blocks, blocks[::-1]) if desc.dtype in ("int4", torch.int8) else (blocks,)
    text = " or ".join(f"({scale.shape[0]}, {a}, {b})" for a, b in dict.fromkeys(orders))
    require(tuple(scale.shape[1:]) in orders, OWNER, name, f"have shape {text}", scale.shape)


def _check_constants(config: LayerSizes, quant: QuantFields) -> None:
    takes = ACTIVATIONS[config.activation].takes
    for field, constant in (("gemm1_alpha", "alpha"), ("gemm1_beta", "beta"), ("gemm1_clamp_limit", "limit")):
        value = getattr(quant, field)
        text = f"be None: activation {config.activation!r} has no such constant"
        require(value is None or constant in takes, OWNER, field, text, value)


def _check_device(config: LayerSizes, quant: QuantFields) -> None:
    found = quant._w1.device or quant._a1.device
    device = torch.device(config.device)
    ok = found is None or (found.type == device.type and device.index in (None, found.index))
    require(ok, OWNER, "device", f"be {found} like the tensors of the quant config", device)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
