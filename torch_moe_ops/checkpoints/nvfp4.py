"""NVFP4 checkpoints: ModelOpt and compressed-tensors.

Both keep two e2m1 codes per byte along K (low nibble first) and an e4m3 scale per 16 of K, linear. They differ in
the direction of the float32 scales: ModelOpt stores factors that dequantize (multiply), compressed-tensors their
reciprocals, the factors that quantize.
"""

from __future__ import annotations

from torch_moe_ops.checkpoints.fields import Fields, Format, add_bias
from torch_moe_ops.checkpoints.linear import Linear
from torch_moe_ops.checkpoints.model_config import ModelConfig
from torch_moe_ops.checkpoints.validate import check_block_scales, positive_scalar, reciprocal_scalar

_BLOCK = 16


def _codes_and_scales(linear: Linear, weight_part: str) -> Fields:
    weight = linear.matrix(weight_part, "U8")
    rows, packed_k = weight.shape
    scale = linear.shaped("weight_scale", (rows, packed_k * 2 // _BLOCK), "F8_E4M3")
    check_block_scales(linear, "weight_scale", scale)
    return {"weight": weight, "scale": scale}


def _read_modelopt(linear: Linear, config: ModelConfig) -> Fields:
    fields = _codes_and_scales(linear, "weight")
    fields["scale_2"] = positive_scalar(linear, "weight_scale_2")
    if "input_scale" in linear:
        fields["input_scale"] = positive_scalar(linear, "input_scale", is_input=True)
    return add_bias(fields, linear)


def _read_compressed_tensors(linear: Linear, config: ModelConfig) -> Fields:
    fields = _codes_and_scales(linear, "weight_packed")
    fields["scale_2"] = reciprocal_scalar(linear, "weight_global_scale")
    if "input_global_scale" in linear:
        fields["input_scale"] = reciprocal_scalar(linear, "input_global_scale", is_input=True)
    return add_bias(fields, linear)


MODELOPT_NVFP4 = Format(
    "ModelOpt NVFP4",
    scheme="nvfp4",
    signature={"weight": ("U8",), "weight_scale": ("F8_E4M3",)},
    required=frozenset({"weight", "weight_scale", "weight_scale_2"}),
    optional=frozenset({"input_scale", "bias"}),
    read=_read_modelopt,
    pack=2,
)
CT_NVFP4 = Format(
    "compressed-tensors nvfp4-pack-quantized",
    scheme="nvfp4",
    signature={"weight_packed": ("U8",), "weight_scale": ("F8_E4M3",)},
    required=frozenset({"weight_packed", "weight_scale", "weight_global_scale"}),
    optional=frozenset({"input_global_scale", "bias"}),
    read=_read_compressed_tensors,
    pack=2,
)
