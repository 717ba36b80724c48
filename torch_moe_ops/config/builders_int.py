"""Builders for int4 and int8 weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torch_moe_ops.config._require import require, require_int
from torch_moe_ops.config.builders_float import require_tensors
from torch_moe_ops.config.formats import FP8, INT8, QuantDType
from torch_moe_ops.config.quant_config import FusedMoEQuantConfig


def int8_w8a8_moe_quant_config(
    w1_scale: Tensor,
    w2_scale: Tensor,
    a1_scale: Tensor | None,
    a2_scale: Tensor | None,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    per_act_token_quant: bool = False,
    *,
    gemm1_alpha: float | None = None,
    gemm1_beta: float | None = None,
    gemm1_clamp_limit: float | None = None,
) -> FusedMoEQuantConfig:
    """int8 weights and activations, symmetric.

    Args:
        w1_scale, w2_scale: float, multiply: [num_experts], or per channel [num_experts, rows(, 1)].
        a1_scale, a2_scale: static float32 scales, multiply a code back to a value; None: dynamic.
        w1_bias, w2_bias: [num_experts, rows], float.
        per_act_token_quant: one activation scale per token.
        gemm1_alpha, gemm1_beta, gemm1_clamp_limit: constants of the activation; None: its own.
    """
    require_tensors("int8_w8a8_moe_quant_config", w1_scale=w1_scale, w2_scale=w2_scale)
    return FusedMoEQuantConfig.make(
        INT8,
        per_act_token_quant,
        w1_scale=w1_scale,
        w2_scale=w2_scale,
        a1_scale=a1_scale,
        a2_scale=a2_scale,
        w1_bias=w1_bias,
        w2_bias=w2_bias,
        gemm1_alpha=gemm1_alpha,
        gemm1_beta=gemm1_beta,
        gemm1_clamp_limit=gemm1_clamp_limit,
    )


def int8_w8a16_moe_quant_config(
    w1_scale: Tensor,
    w2_scale: Tensor,
    w1_zp: Tensor | None,
    w2_zp: Tensor | None,
    block_shape: Sequence[int] | None = None,
    *,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    gemm1_alpha: float | None = None,
    gemm1_beta: float | None = None,
    gemm1_clamp_limit: float | None = None,
) -> FusedMoEQuantConfig:
    """int8 weights, activations not quantized.

    Args:
        w1_scale, w2_scale: float, multiply: [num_experts, rows(, 1)], or [num_experts, ...] per group.
        w1_zp, w2_zp: zero points, both or neither.
        block_shape: [1, g] or [0, g] for groups of g along K; [1, -1] for the whole row.
        w1_bias, w2_bias: [num_experts, rows], float.
        gemm1_alpha, gemm1_beta, gemm1_clamp_limit: constants of the activation; None: its own.
    """
    return _weight_only(
        "int8_w8a16_moe_quant_config",
        INT8,
        w1_scale,
        w2_scale,
        block_shape=block_shape,
        w1_zp=w1_zp,
        w2_zp=w2_zp,
        w1_bias=w1_bias,
        w2_bias=w2_bias,
        gemm1_alpha=gemm1_alpha,
        gemm1_beta=gemm1_beta,
        gemm1_clamp_limit=gemm1_clamp_limit,
    )


def int4_w4a16_moe_quant_config(
    w1_scale: Tensor,
    w2_scale: Tensor,
    w1_zp: Tensor | None,
    w2_zp: Tensor | None,
    block_shape: Sequence[int] | None = None,
    *,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    gemm1_alpha: float | None = None,
    gemm1_beta: float | None = None,
    gemm1_clamp_limit: float | None = None,
) -> FusedMoEQuantConfig:
    """int4 weights, activations not quantized.

    Args:
        w1_scale, w2_scale: float, multiply: [num_experts, ...] per group, [num_experts, rows] per row.
        w1_zp, w2_zp: zero points, both or neither.
        block_shape: [1, g] or [0, g] for groups of g along K; [1, -1] for the whole row.
        w1_bias, w2_bias: [num_experts, rows], float.
        gemm1_alpha, gemm1_beta, gemm1_clamp_limit: constants of the activation; None: its own.
    """
    name = "int4_w4a16_moe_quant_config"
    return _weight_only(
        name,
        "int4",
        w1_scale,
        w2_scale,
        block_shape=block_shape,
        w1_zp=w1_zp,
        w2_zp=w2_zp,
        w1_bias=w1_bias,
        w2_bias=w2_bias,
        gemm1_alpha=gemm1_alpha,
        gemm1_beta=gemm1_beta,
        gemm1_clamp_limit=gemm1_clamp_limit,
    )


def int4_w4afp8_moe_quant_config(
    w1_scale: Tensor,
    w2_scale: Tensor,
    g1_alphas: Tensor,
    g2_alphas: Tensor,
    per_act_token_quant: bool = False,
    per_out_ch_quant: bool = False,
    block_shape: Sequence[int] | None = None,
    *,
    gemm1_alpha: float | None = None,
    gemm1_beta: float | None = None,
    gemm1_clamp_limit: float | None = None,
) -> FusedMoEQuantConfig:
    """int4 weights, fp8 (e4m3) activations.

    Args:
        w1_scale, w2_scale: group scales, float or e4m3, multiply: [num_experts, rows, K / g].
        g1_alphas, g2_alphas: float32 scales per output channel, [num_experts, rows] or
            [num_experts, rows, 1]; multiply the accumulator. They are not products with an input
            scale: the config keeps them as `w1_channel_scale` and `w2_channel_scale`.
        per_act_token_quant: one activation scale per token.
        per_out_ch_quant: says that g1_alphas and g2_alphas are per output channel, and checks it.
        block_shape: [1, g] or [0, g] for weight groups of g along K. Activations have no groups: beside
            it, per_act_token_quant must be True.
        gemm1_alpha, gemm1_beta, gemm1_clamp_limit: constants of the activation; None: its own.
    """
    required = {"w1_scale": w1_scale, "w2_scale": w2_scale, "g1_alphas": g1_alphas, "g2_alphas": g2_alphas}
    require_tensors("int4_w4afp8_moe_quant_config", **required)
    return FusedMoEQuantConfig.make(
        FP8,
        per_act_token_quant,
        per_out_ch_quant,
        block_shape,
        w1_scale=w1_scale,
        w2_scale=w2_scale,
        g1_alphas=g1_alphas,
        g2_alphas=g2_alphas,
        weight_dtype="int4",
        gemm1_alpha=gemm1_alpha,
        gemm1_beta=gemm1_beta,
        gemm1_clamp_limit=gemm1_clamp_limit,
    )


def gptq_marlin_moe_quant_config(
    w1_scale: Tensor,
    w2_scale: Tensor,
    weight_bits: int,
    group_size: int,
    w1_zp: Tensor | None = None,
    w2_zp: Tensor | None = None,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    *,
    gemm1_alpha: float | None = None,
    gemm1_beta: float | None = None,
    gemm1_clamp_limit: float | None = None,
) -> FusedMoEQuantConfig:
    """GPTQ weights (int4 or int8), activations not quantized.

    Args:
        w1_scale, w2_scale: float, multiply: one per group, [num_experts, ...].
        weight_bits: 4 or 8.
        group_size: values of K per scale; -1: the whole row.
        w1_zp, w2_zp: zero points, both or neither (symmetric).
        w1_bias, w2_bias: [num_experts, rows], float.
        gemm1_alpha, gemm1_beta, gemm1_clamp_limit: constants of the activation; None: its own.
    """
    name = "gptq_marlin_moe_quant_config"
    dtype, block = _bits_and_group(name, weight_bits, group_size)
    return _weight_only(
        name,
        dtype,
        w1_scale,
        w2_scale,
        block_shape=block,
        w1_zp=w1_zp,
        w2_zp=w2_zp,
        w1_bias=w1_bias,
        w2_bias=w2_bias,
        gemm1_alpha=gemm1_alpha,
        gemm1_beta=gemm1_beta,
        gemm1_clamp_limit=gemm1_clamp_limit,
    )


def awq_marlin_moe_quant_config(
    w1_scale: Tensor,
    w2_scale: Tensor,
    w1_zp: Tensor,
    w2_zp: Tensor,
    weight_bits: int,
    group_size: int,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    *,
    gemm1_alpha: float | None = None,
    gemm1_beta: float | None = None,
    gemm1_clamp_limit: float | None = None,
) -> FusedMoEQuantConfig:
    """AWQ weights (int4 or int8 with zero points), activations not quantized.

    Args:
        w1_scale, w2_scale: float, multiply: one per group, [num_experts, ...].
        w1_zp, w2_zp: zero points, required: AWQ is asymmetric. Symmetric weights are GPTQ's builder.
        weight_bits: 4 or 8.
        group_size: values of K per scale; -1: the whole row.
        w1_bias, w2_bias: [num_experts, rows], float.
        gemm1_alpha, gemm1_beta, gemm1_clamp_limit: constants of the activation; None: its own.
    """
    name = "awq_marlin_moe_quant_config"
    require_tensors(name, w1_zp=w1_zp, w2_zp=w2_zp)
    dtype, block = _bits_and_group(name, weight_bits, group_size)
    return _weight_only(
        name,
        dtype,
        w1_scale,
        w2_scale,
        block_shape=block,
        w1_zp=w1_zp,
        w2_zp=w2_zp,
        w1_bias=w1_bias,
        w2_bias=w2_bias,
        gemm1_alpha=gemm1_alpha,
        gemm1_beta=gemm1_beta,
        gemm1_clamp_limit=gemm1_clamp_limit,
    )


def _bits_and_group(builder: str, weight_bits: int, group_size: int) -> tuple[QuantDType, list[int]]:
    require(weight_bits in (4, 8), builder, "weight_bits", "be 4 or 8", weight_bits)
    require_int(builder, "group_size", group_size, -1)
    require(group_size != 0, builder, "group_size", "be -1 (the whole row) or at least 1", group_size)
    return ("int4" if weight_bits == 4 else INT8), [1, group_size]


def _weight_only(
    builder: str, dtype: QuantDType, w1_scale: Tensor, w2_scale: Tensor, **others: Any
) -> FusedMoEQuantConfig:
    """Integer weights, activations not quantized: the group shape goes to the weight, and only there."""
    require_tensors(builder, w1_scale=w1_scale, w2_scale=w2_scale)
    return FusedMoEQuantConfig.make(None, weight_dtype=dtype, w1_scale=w1_scale, w2_scale=w2_scale, **others)
