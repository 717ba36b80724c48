"""compressed-tensors integer checkpoints: pack-quantized int4 and int-quantized int8."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_moe_ops.checkpoints.fields import Fields, Format, add_bias
from torch_moe_ops.checkpoints.linear import Linear
from torch_moe_ops.checkpoints.model_config import ModelConfig
from torch_moe_ops.checkpoints.nibbles import CODES_PER_WORD, check_group_index, nibbles
from torch_moe_ops.checkpoints.validate import check_block_scales, positive_scalar

_FLOATS = ("F32", "BF16", "F16")
_MXINT4_GROUP = 32


def _group_scales(linear: Linear, rows: int, k: int, *, signed: bool) -> Tensor:
    """[rows, number of groups] in the stored dtype; a scale per row or per tensor is one group."""
    scale = linear.tensor("weight_scale", *_FLOATS)
    if scale.numel() == 1:
        scale = scale.reshape(1, 1).expand(rows, 1)
    elif scale.ndim == 1:
        scale = scale.unsqueeze(1)
    if scale.ndim != 2 or scale.shape[0] != rows or scale.shape[1] == 0 or k % scale.shape[1]:
        requirement = f"have shape [{rows} rows, a divisor of K = {k}]"
        raise linear.fail("weight_scale", requirement, tuple(scale.shape))
    check_block_scales(linear, "weight_scale", scale, signed=signed)
    return scale


def _read_int4(linear: Linear, config: ModelConfig) -> Fields:
    weight = linear.matrix("weight_packed", "I32")
    rows, k = weight.shape[0], weight.shape[1] * CODES_PER_WORD
    bits = config.weight_arguments.get("num_bits", 4)
    if bits != 4:
        raise linear.fail("weight_packed", "hold 4-bit codes", f"num_bits {bits!r} in config.json")
    if "weight_shape" in linear:
        shape = linear.shaped("weight_shape", (2,), "I64", "I32").tolist()
        if shape != [rows, k]:
            # 8-bit codes, or a K that is padded to whole words.
            raise linear.fail("weight_shape", f"be {[rows, k]}, 8 codes in each int32", shape)
    # Automatic rounding may choose negative scales to use all 16 levels.
    fields = {"weight": weight, "scale": _group_scales(linear, rows, k, signed=True)}
    groups = fields["scale"].shape[1]
    if "weight_g_idx" in linear:
        check_group_index(linear, "weight_g_idx", k, groups)
    if "weight_zero_point" in linear:
        fields["zero_point"] = _int4_zero_point(linear, rows, groups)
    return add_bias(fields, linear)


def _int4_zero_point(linear: Linear, rows: int, groups: int) -> Tensor:
    """uint8 [rows, groups] on the grid of the stored codes (8 stands for 0)."""
    if linear.entry("weight_zero_point").dtype == "I32":
        # Eight rows share a word, unlike the codes, of which eight columns do.
        words = linear.shaped("weight_zero_point", (-(-rows // CODES_PER_WORD), groups), "I32")
        return nibbles(words.t()).t()[:rows]
    zero_point = linear.shaped("weight_zero_point", (rows, groups), "I8")
    if bool(((zero_point < -8) | (zero_point > 7)).any()):
        raise linear.fail("weight_zero_point", "lie in -8..7", f"values up to {int(zero_point.abs().max())}")
    return (zero_point + 8).to(torch.uint8)


def _int4_scheme(linear: Linear) -> str:
    """bf16 scales of 32 symmetric values are their own scheme: kernels exist for exactly that."""
    packed, scale = linear.shape("weight_packed"), linear.shape("weight_scale")
    fits = len(scale) == len(packed) == 2 and scale[-1] * _MXINT4_GROUP == packed[-1] * CODES_PER_WORD
    is_bf16 = linear.entry("weight_scale").dtype == "BF16"
    return "mxint4" if fits and is_bf16 and "weight_zero_point" not in linear else "int4"


def _read_int8(linear: Linear, config: ModelConfig) -> Fields:
    weight = linear.matrix("weight", "I8")
    rows, k = weight.shape
    fields = {"weight": weight, "scale": _group_scales(linear, rows, k, signed=False)}
    if "weight_zero_point" in linear:
        zero_point = linear.tensor("weight_zero_point", "I8")
        groups = fields["scale"].shape[1]
        if zero_point.numel() not in (1, rows * groups):
            raise linear.fail("weight_zero_point", f"have shape {(rows, groups)}", tuple(zero_point.shape))
        shape = (1, 1) if zero_point.numel() == 1 else (rows, groups)
        fields["zero_point"] = zero_point.reshape(shape).expand(rows, groups)
    if "input_scale" in linear:
        fields["input_scale"] = positive_scalar(linear, "input_scale", is_input=True)
    if "input_zero_point" in linear and bool(linear.tensor("input_zero_point", "I8", "I32").any()):
        raise linear.fail("input_zero_point", "be zero: activations are quantized symmetrically", "another value")
    return add_bias(fields, linear)


CT_INT4 = Format(
    "compressed-tensors pack-quantized int4",
    scheme=_int4_scheme,
    signature={"weight_packed": ("I32",)},
    required=frozenset({"weight_packed", "weight_scale"}),
    optional=frozenset({"weight_shape", "weight_zero_point", "weight_g_idx", "bias"}),
    read=_read_int4,
    pack=CODES_PER_WORD,
)
CT_INT8 = Format(
    "int8 (compressed-tensors int-quantized)",
    scheme="int8",
    signature={"weight": ("I8",), "weight_scale": _FLOATS},
    required=frozenset({"weight", "weight_scale"}),
    optional=frozenset({"weight_zero_point", "input_scale", "input_zero_point", "bias"}),
    read=_read_int8,
)
