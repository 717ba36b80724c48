"""Dtypes and shapes of `w1_scale` and `w2_scale`."""

from __future__ import annotations

from torch import Tensor

from torch_moe_ops.config._require import require, require_type
from torch_moe_ops.config.descriptors import FusedMoEQuantDesc, GroupShape, is_precision_config
from torch_moe_ops.config.formats import FORMATS, FP8, fixed_block
from torch_moe_ops.config.quant_fields import QuantFields
from torch_moe_ops.config.shapes import OWNER
from torch_moe_ops.core.schemes import ceil_div
from torch_moe_ops.numerics.swizzle import padded_shape

# The 128x4 tiling of tensor core kernels: rows are padded to 128, block columns to 4.
TILE_ROWS, TILE_COLS = 128, 4


def possible_layouts(scale: Tensor) -> tuple[str, ...]:
    """How block scales of this shape may lie, where the weight's sizes are not known."""
    # Swizzled ones are flat, or still seen as a matrix; whole tiles either way.
    flat = scale.ndim == 2 and scale.shape[1] % (TILE_ROWS * TILE_COLS) == 0
    tiles = scale.ndim == 3 and scale.shape[1] % TILE_ROWS == 0 and scale.shape[2] % TILE_COLS == 0
    return ("linear",) * (scale.ndim == 3) + ("swizzled",) * (flat or tiles)


def fitting_layouts(scale: Tensor, rows: int, cols: int) -> tuple[str, ...]:
    """How the scales of `rows` rows of `cols` blocks may lie. Both where there is nothing to pad."""
    padded_rows, padded_cols = padded_shape(rows, cols)
    linear = tuple(scale.shape[1:]) == (rows, cols)
    swizzled = "swizzled" in possible_layouts(scale) and scale[0].numel() == padded_rows * padded_cols
    return ("linear",) * linear + ("swizzled",) * swizzled


def fitting_shapes(scale: Tensor, rows: int, cols: int, layout: str | None) -> str:
    """What `fitting_layouts` asks for, in words."""
    padded_rows, padded_cols = padded_shape(rows, cols)
    texts = {
        "linear": f"have shape {(scale.shape[0], rows, cols)}",
        "swizzled": f"hold {padded_rows} x {padded_cols} swizzled scales per expert for {rows} rows of {cols} blocks",
    }
    return texts[layout] if layout else " or ".join(texts[name] for name in possible_layouts(scale) or texts)


def check_weight_scales(config: QuantFields) -> None:
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
        if fixed_block(desc.dtype) is None:
            _check_shape(name, scale, desc)
        else:
            _check_block_shape(name, scale, desc, config.scale_layout)
    first, second = config._w1.scale, config._w2.scale
    text = f"be of the same kind as w1_scale ({type(first).__name__})"
    require_type(isinstance(first, Tensor) == isinstance(second, Tensor), OWNER, "w2_scale", text, second)
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        require(first.dtype == second.dtype, OWNER, "w2_scale", f"have dtype {first.dtype} like w1_scale", second.dtype)
        block = fixed_block(config._w1.dtype)
        if block is not None:
            _check_pair(first, second, block[1], config.scale_layout)
        elif FORMATS[config._w1.dtype].has_zero_points:
            _check_groups(first, second, config._w1.shape)
        else:
            _check_tiles(first, second, config._w1.shape)


def _check_block_shape(name: str, scale: Tensor, desc: FusedMoEQuantDesc, layout: str | None) -> None:
    possible = possible_layouts(scale)
    if layout == "swizzled":
        text = f"be swizzled: (num_experts, multiple of {TILE_ROWS}, multiple of {TILE_COLS}), or flat"
    else:
        text = f"have 3 dimensions for blocks of {tuple(desc.shape or ())}"
    require(bool(possible) if layout is None else layout in possible, OWNER, name, text, scale.shape)


def _check_pair(first: Tensor, second: Tensor, block: int, layout: str | None) -> None:
    """Both lie alike, and as w13 and w2 of one layer."""
    possible = [name for name in possible_layouts(first) if name in possible_layouts(second)]
    text = f"be {' or '.join(possible_layouts(first))} like w1_scale"
    require(bool(possible), OWNER, "w2_scale", text, second.shape)
    if layout == "linear" or possible == ["linear"]:
        _check_against_each_other(first, second, block)


def _check_groups(first: Tensor, second: Tensor, shape: GroupShape | None) -> None:
    """Integer weights [E, rows, groups] or, as Marlin keeps them, [E, groups, rows]: one's K are the other's rows."""
    if shape is None or not shape.is_block():
        return
    fits = any(
        groups13 == ceil_div(hidden, shape.col)
        and groups2 in (ceil_div(rows, shape.col), ceil_div(rows // 2, shape.col))
        for rows, groups13 in (first.shape[1:], first.shape[:0:-1])
        for hidden, groups2 in (second.shape[1:], second.shape[:0:-1])
    )
    other = f"w2_scale {tuple(second.shape)}"
    text = f"hold a scale per {shape.col} of K like {other}: the rows of each are the K of the other"
    require(fits, OWNER, "w1_scale", text, first.shape)


def _check_tiles(first: Tensor, second: Tensor, shape: GroupShape | None) -> None:
    """fp8 tiles: the halves of w13 are tiled separately."""
    if shape is None or not shape.is_block():
        return
    hidden, inter = second.shape[1:]
    text = f"have {hidden} tiles along K and {inter} or {2 * inter} along rows for w2_scale {tuple(second.shape)}"
    require(tuple(first.shape[1:]) in ((inter, hidden), (2 * inter, hidden)), OWNER, "w1_scale", text, first.shape)


def _check_shape(name: str, scale: Tensor, desc: FusedMoEQuantDesc) -> None:
    shape, dims = desc.shape, scale.ndim
    if shape is not None and shape.is_block():
        require(dims == 3, OWNER, name, f"have 3 dimensions for blocks of {tuple(shape)}", scale.shape)
    elif shape == GroupShape.PER_TOKEN:
        ok = dims == 2 or (dims == 3 and 1 in (scale.shape[1], scale.shape[2]))
        require(ok, OWNER, name, "have shape (num_experts, rows) or (num_experts, rows, 1)", scale.shape)
    else:
        low = 2 if desc.dtype == "int4" else 1
        ok = low <= dims <= 3
        require(ok, OWNER, name, f"have {low} to 3 dimensions (num_experts, ...)", scale.shape)
        whole_rows = desc.dtype != FP8 or dims < 3 or 1 in scale.shape[1:]
        require(whole_rows, OWNER, name, "hold one scale, one per half or one per row of each expert", scale.shape)


def _check_against_each_other(first: Tensor, second: Tensor, block: int) -> None:
    """w13 is [2I or I, H] and w2 is [H, I]: each one's columns are the other's rows."""
    hidden_blocks = ceil_div(second.shape[1], block)
    requirement = f"have {hidden_blocks} blocks along K for the {second.shape[1]} rows of w2_scale"
    require(first.shape[2] == hidden_blocks, OWNER, "w1_scale", requirement, first.shape)
    rows, columns = first.shape[1], second.shape[2]
    plain = ceil_div(rows, block) == columns
    gated = rows % 2 == 0 and ceil_div(rows // 2, block) == columns
    requirement = f"have the rows of w13, gated or not, for {columns} blocks of intermediate size in w2_scale"
    require(plain or gated, OWNER, "w1_scale", requirement, first.shape)
