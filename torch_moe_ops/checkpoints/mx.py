"""Microscaling checkpoints: MXFP4 and MXFP8 with one e8m0 exponent byte, value 2^(byte-127), per 32 of K.

gpt-oss fuses all experts and interleaves gate and up rows; compressed-tensors, Quark and DeepSeek-V4 keep one
matrix per projection. All of them pack two e2m1 codes per byte along K, low nibble first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_moe_ops.checkpoints.fields import Fields, Format, add_bias
from torch_moe_ops.checkpoints.linear import Linear
from torch_moe_ops.checkpoints.model_config import ModelConfig
from torch_moe_ops.checkpoints.validate import check_block_scales, check_numbers

BLOCK = 32
E8M0_DTYPES = ("U8", "F8_E8M0")


def _exponents(linear: Linear, part: str, rows: int, k: int) -> Tensor:
    scale = linear.shaped(part, (rows, k // BLOCK), *E8M0_DTYPES).view(torch.uint8)
    check_block_scales(linear, part, scale)
    return scale


def _read_blocks(linear: Linear, config: ModelConfig) -> Fields:
    blocks = linear.tensor("blocks", "U8")
    if blocks.ndim != 3 or blocks.shape[2] != BLOCK // 2:
        raise linear.fail("blocks", "have shape [rows, K / 32, 16] per expert", tuple(blocks.shape))
    rows, k = blocks.shape[0], blocks.shape[1] * BLOCK
    fields = {"weight": blocks.reshape(rows, k // 2), "scale": _exponents(linear, "scales", rows, k)}
    return add_bias(fields, linear)


def _read_fp4(linear: Linear, config: ModelConfig) -> Fields:
    # DeepSeek-V4 says int8; the bits are the same.
    weight = linear.matrix(linear.weight_part, "U8", "I8").view(torch.uint8)
    rows, k = weight.shape[0], weight.shape[1] * 2
    return add_bias({"weight": weight, "scale": _exponents(linear, "weight_scale", rows, k)}, linear)


def _read_fp8(linear: Linear, config: ModelConfig) -> Fields:
    weight = check_numbers(linear, "weight", linear.matrix("weight", "F8_E4M3"))
    return add_bias({"weight": weight, "scale": _exponents(linear, "weight_scale", *weight.shape)}, linear)


def _is_per_block(linear: Linear, config: ModelConfig) -> bool:
    """One scale per 32 values, and not per 128x128 tile (DeepSeek-V4 keeps those as e8m0 too)."""
    weight, scale = linear.shape("weight"), linear.shape("weight_scale")
    return len(weight) == 2 and len(scale) == 2 and weight[0] * weight[1] == BLOCK * scale[0] * scale[1]


GPT_OSS_MXFP4 = Format(
    "gpt-oss MXFP4",
    scheme="mxfp4",
    signature={"blocks": ("U8",)},
    required=frozenset({"blocks", "scales"}),
    optional=frozenset({"bias"}),
    read=_read_blocks,
    interleaved=True,
)
CT_MXFP4 = Format(
    "compressed-tensors mxfp4-pack-quantized",
    scheme="mxfp4",
    signature={"weight_packed": ("U8",), "weight_scale": E8M0_DTYPES},
    required=frozenset({"weight_packed", "weight_scale"}),
    optional=frozenset({"bias"}),
    read=_read_fp4,
    pack=2,
)
E8M0_FP4 = Format(
    "FP4 with e8m0 scales (DeepSeek-V4, Quark)",
    scheme="mxfp4",
    signature={"weight": ("U8", "I8"), "weight_scale": E8M0_DTYPES},
    required=frozenset({"weight", "weight_scale"}),
    optional=frozenset({"bias"}),
    read=_read_fp4,
    pack=2,
)
MXFP8 = Format(
    "MXFP8 (ModelOpt, compressed-tensors)",
    scheme="mxfp8",
    signature={"weight": ("F8_E4M3",), "weight_scale": E8M0_DTYPES},
    required=frozenset({"weight", "weight_scale"}),
    optional=frozenset({"bias"}),
    read=_read_fp8,
    when=_is_per_block,
)
