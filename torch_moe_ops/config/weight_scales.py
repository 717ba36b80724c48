"""Dtypes and shapes of `w1_scale` and `w2_scale`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from torch_moe_ops.config._require import require, require_type
from torch_moe_ops.config.descriptors import FusedMoEQuantDesc, GroupShape, is_precision_config
from torch_moe_ops.config.formats import FORMATS, fixed_block
from torch_moe_ops.config.shapes import OWNER

if TYPE_CHECKING:
    from torch_moe_ops.config.quant_config import FusedMoEQuantConfig

# The 128x4 tiling of tensor core kernels: rows are padded to 128, block columns to 4.
TILE_ROWS, TILE_COLS = 128, 4


def check_weight_scales(config: FusedMoEQuantConfig) -> None:
    """Raise ValueError or TypeError where a weight scale does not fit its format, layout or the other weight."""
    for operand, desc in (("w1", config._w1), ("w2", config._w2)):
        scale, name = desc.scale, f"{operand}_scale"
        if scale is None:
            continue
        if is_precision_config(scale):
            ok = desc.dtype == "mxfp4"
            require_type(ok, OWNER, name, f"be a Tensor for weights of dtype {desc.dtype}", scale)
            continue
        dtypes = FORMATS[desc.dtype].scale_dtypes
        text = f"have a dtype of {[str(d) for d in dtypes]} for {desc.dtype}"
        require(scale.dtype in dtypes, OWNER, name, text, scale.dtype)
        _check_shape(name, scale, desc, config.scale_layout)
    first, second = config._w1.scale, config._w2.scale
    text = f"be of the same kind as w1_scale ({type(first).__name__})"
    require_type(isinstance(first, Tensor) == isinstance(second, Tensor), OWNER, "w2_scale", text, second)
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        require(first.dtype == second.dtype, OWNER, "w2_scale", f"have dtype {first.dtype} like w1_scale", second.dtype)
        if fixed_block(config._w1.dtype) is not None and config.scale_layout == "linear":
            _check_against_each_other(first, second, fixed_block(config._w1.dtype)[1])  # type: ignore[index]


def _check_shape(name: str, scale: Tensor, desc: FusedMoEQuantDesc, layout: str) -> None:
    shape, dims = desc.shape, scale.ndim
    if layout == "swizzled":
        # Flat, or still seen as a matrix; whole tiles either way.
        flat = dims == 2 and scale.shape[1] % (TILE_ROWS * TILE_COLS) == 0
        tiles = dims == 3 and scale.shape[1] % TILE_ROWS == 0 and scale.shape[2] % TILE_COLS == 0
        text = f"be swizzled: (num_experts, multiple of {TILE_ROWS}, multiple of {TILE_COLS}), or flat"
        require(flat or tiles, OWNER, name, text, scale.shape)
    elif shape is not None and shape.is_block():
        require(dims == 3, OWNER, name, f"have 3 dimensions for blocks of {tuple(shape)}", scale.shape)
    elif shape == GroupShape.PER_TOKEN:
        ok = dims == 2 or (dims == 3 and 1 in (scale.shape[1], scale.shape[2]))
        require(ok, OWNER, name, "have shape (num_experts, rows) or (num_experts, rows, 1)", scale.shape)
    else:
        low = 2 if desc.dtype == "int4" else 1
        ok = low <= dims <= 3
        require(ok, OWNER, name, f"have {low} to 3 dimensions (num_experts, ...)", scale.shape)


def _check_against_each_other(first: Tensor, second: Tensor, block: int) -> None:
    """w13 is [2I or I, H] and w2 is [H, I]: each one's columns are the other's rows."""
    hidden_blocks = -(-second.shape[1] // block)
    requirement = f"have {hidden_blocks} blocks along K for the {second.shape[1]} rows of w2_scale"
    require(first.shape[2] == hidden_blocks, OWNER, "w1_scale", requirement, first.shape)
    rows, columns = first.shape[1], second.shape[2]
    plain = -(-rows // block) == columns
    gated = rows % 2 == 0 and -(-(rows // 2) // block) == columns
    requirement = f"have the rows of w13, gated or not, for {columns} blocks of intermediate size in w2_scale"
    require(plain or gated, OWNER, "w1_scale", requirement, first.shape)
