"""Whether the ops can run what a FusedMoEQuantConfig describes: which values share a scale, which scales are static.

What the sizes of a layer or the values of tensors decide is not known here.
"""

from __future__ import annotations

from torch import Tensor

from torch_moe_ops.config._require import require
from torch_moe_ops.config.descriptors import FusedMoEQuantDesc, GroupShape
from torch_moe_ops.config.formats import FORMATS, FP8, INT8
from torch_moe_ops.config.quant_fields import QuantFields
from torch_moe_ops.config.queries import scheme_name
from torch_moe_ops.config.shapes import OWNER
from torch_moe_ops.core.schemes import SCHEMES, Scheme

WHOLE = (None, GroupShape.PER_TENSOR, GroupShape.PER_TOKEN)  # one scale, or one per row
TILE = GroupShape(128, 128)  # of fp8_block; its activations have a scale per token and 128 of K


def check_runnable(config: QuantFields) -> None:
    """Raise ValueError that names what no op of the weights' scheme could run."""
    _check_weight_groups(config._w1)
    _check_activation_groups(config)
    scheme = SCHEMES[scheme_name(config)]
    for operand, act in (("a1", config._a1), ("a2", config._a2)):
        _check_static_scales(operand, act, scheme, config.act_format)
    if config._w1.dtype == FP8:
        for name, weight in (("g1_alphas", config._w1), ("g2_alphas", config._w2)):
            _check_fp8_alpha(name, weight)


def _check_weight_groups(weight: FusedMoEQuantDesc) -> None:
    shape, name = weight.shape, f"weights of dtype {weight.dtype}"
    if weight.dtype == FP8:
        require(shape in (*WHOLE, TILE), OWNER, "block_shape", f"be {list(TILE)} or None for {name}", _sizes(shape))
    elif FORMATS[weight.dtype].has_zero_points:
        scales = SCHEMES[FORMATS[weight.dtype].scheme].scales
        sizes = scales.sizes if scales else ()
        ok = shape in WHOLE or (shape is not None and shape.row == 1 and shape.col in sizes)
        texts = " or ".join(str([1, size]) for size in (*sizes, -1))
        require(ok, OWNER, "block_shape", f"be {texts} for {name}", _sizes(shape))


def _check_activation_groups(config: QuantFields) -> None:
    act = config._a1
    if act.dtype not in (FP8, INT8):
        return
    tiled = config._w1.shape == TILE
    known = (None, TILE, GroupShape(1, TILE.col)) if tiled else WHOLE
    scales = f"a scale per token and {TILE.col} of K" if tiled else "one scale, or one per token"
    text = f"give {config.act_format} activations {scales}, as {config.scheme} weights need it"
    require(act.shape in known, OWNER, "block_shape", text, _sizes(act.shape))


def _check_static_scales(operand: str, act: FusedMoEQuantDesc, scheme: Scheme, act_format: str) -> None:
    for field in ("scale", "gscale"):
        name, absent = f"{operand}_{field}", getattr(act, field) is None
        text = f"be None: {act_format} activations with {scheme.name} weights have dynamic scales"
        require(absent or act_format in scheme.static_acts, OWNER, name, text, "a Tensor")
        text = "be None where per_act_token_quant is True: scales of tokens go with the call, as hidden_states_scale"
        require(absent or act.shape != GroupShape.PER_TOKEN, OWNER, name, text, "a Tensor")


def _check_fp8_alpha(name: str, weight: FusedMoEQuantDesc) -> None:
    """fp8's alphas repeat `w*_scale`: they are of whole matrices, or of halves of w13."""
    if weight.alpha is None:
        return
    scale, text = weight.scale, "be None for fp8 weights with a scale per output channel or block"
    whole = weight.shape in (None, GroupShape.PER_TENSOR)
    few = not isinstance(scale, Tensor) or scale.ndim == 0 or scale.numel() <= 2 * scale.shape[0]
    require(whole and few, OWNER, name, text, "a Tensor")


def _sizes(shape: GroupShape | None) -> list[int] | None:
    return None if shape is None else list(shape)
