"""FP8 checkpoints: e4m3 with a scale per tensor, per output row, or per 128x128 tile.

Every scale multiplies, DeepSeek's `weight_scale_inv` included.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_moe_ops.checkpoints.fields import Fields, Format, add_bias
from torch_moe_ops.checkpoints.linear import Linear
from torch_moe_ops.checkpoints.model_config import ModelConfig
from torch_moe_ops.checkpoints.validate import check_block_scales, check_numbers, positive_scalar

TILE = 128
_FLOATS = ("F32", "BF16", "F16")


def _read_tensor_or_channel(linear: Linear, config: ModelConfig) -> Fields:
    weight = check_numbers(linear, "weight", linear.matrix("weight", "F8_E4M3"))
    fields = {"weight": weight, "scale": _tensor_or_channel_scale(linear, weight.shape[0])}
    if "input_scale" in linear:
        fields["input_scale"] = positive_scalar(linear, "input_scale", is_input=True)
    return add_bias(fields, linear)


def _tensor_or_channel_scale(linear: Linear, rows: int) -> Tensor:
    """float32 [1], or [rows, 1]."""
    part = _scale_part(linear)
    scale = linear.tensor(part, *_FLOATS)
    if scale.numel() == 1:
        return positive_scalar(linear, part).reshape(1)
    if scale.numel() != rows or max(scale.shape) != rows:
        raise linear.fail(part, f"have one element, or one per row ({rows})", tuple(scale.shape))
    check_block_scales(linear, part, scale)
    return scale.reshape(rows, 1).to(torch.float32)


def _read_tiles(linear: Linear, config: ModelConfig) -> Fields:
    part = _scale_part(linear)
    # The tile comes from the config, never from the shapes: 144 rows in 2 tiles are 128 + 16, not 72 + 72.
    tile = config.weight_block_size
    if tile not in (None, (TILE, TILE)):
        raise linear.fail(part, f"have tiles of {TILE} x {TILE}", f"{tile} in config.json")
    weight = check_numbers(linear, "weight", linear.matrix("weight", "F8_E4M3"))
    rows, k = weight.shape
    if linear.projection == "gate_up" and rows % (2 * TILE):
        raise linear.fail("weight", f"have gate and up rows in multiples of {TILE}, else a tile spans both", rows)
    scale = linear.shaped(part, (-(-rows // TILE), -(-k // TILE)), *_FLOATS, "F8_E8M0")
    check_block_scales(linear, part, scale)
    return add_bias({"weight": weight, "scale": scale.to(torch.float32)}, linear)


def _scale_part(linear: Linear) -> str:
    return "weight_scale" if "weight_scale" in linear else "weight_scale_inv"


def _is_tiled(linear: Linear, config: ModelConfig) -> bool:
    """Whether a scale belongs to a tile, and not to a row or to the whole matrix.

    The shape tells. Only one scale for all, and one row of tiles as wide as the matrix has rows, fit two readings:
    there the config decides.
    """
    weight, scale = linear.shape("weight"), linear.shape(_scale_part(linear))
    strategy = config.weight_arguments.get("strategy")
    if math.prod(scale) == 1:
        return config.weight_block_size is not None or strategy == "block"
    if len(weight) != 2 or len(scale) != 2:
        return False
    if scale == tuple(-(-size // TILE) for size in weight) and strategy in (None, "block"):
        return True
    # Per channel, one of the dimensions is 1 and the other one counts rows.
    return not (1 in scale and max(scale) in weight)


FP8_TILES_INV = Format(
    "FP8 128x128 (DeepSeek)",
    scheme="fp8_block",
    signature={"weight": ("F8_E4M3",), "weight_scale_inv": (*_FLOATS, "F8_E8M0")},
    required=frozenset({"weight", "weight_scale_inv"}),
    optional=frozenset({"bias"}),
    read=_read_tiles,
    when=_is_tiled,
)
FP8_TILES = Format(
    "FP8 128x128 (compressed-tensors, DeepSeek-V4)",
    scheme="fp8_block",
    signature={"weight": ("F8_E4M3",), "weight_scale": (*_FLOATS, "F8_E8M0")},
    required=frozenset({"weight", "weight_scale"}),
    optional=frozenset({"bias"}),
    read=_read_tiles,
    when=_is_tiled,
)
FP8 = Format(
    "FP8 per tensor or channel (ModelOpt, compressed-tensors)",
    scheme="fp8",
    signature={"weight": ("F8_E4M3",), "weight_scale": _FLOATS},
    required=frozenset({"weight", "weight_scale"}),
    optional=frozenset({"input_scale", "bias"}),
    read=_read_tensor_or_channel,
)
FP8_INV = Format(
    "FP8 per tensor or channel (weight_scale_inv)",
    scheme="fp8",
    signature={"weight": ("F8_E4M3",), "weight_scale_inv": _FLOATS},
    required=frozenset({"weight", "weight_scale_inv"}),
    optional=frozenset({"input_scale", "bias"}),
    read=_read_tensor_or_channel,
)
