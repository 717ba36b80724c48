"""Builders for fp8, nvfp4 and unquantized weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torch_moe_ops.config._require import require_type
from torch_moe_ops.config.descriptors import FusedMoEQuantDesc
from torch_moe_ops.config.formats import FP8
from torch_moe_ops.config.quant_config import FusedMoEQuantConfig


def require_tensors(builder: str, **tensors: Any) -> None:
    """Raise TypeError for the first argument that is None: the scheme has no meaning without it."""
    for name, value in tensors.items():
        require_type(value is not None, builder, name, "be a Tensor", value)


def fp8_w8a8_moe_quant_config(
    w1_scale: Tensor,
    w2_scale: Tensor,
    a1_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    per_act_token_quant: bool = False,
    per_out_ch_quant: bool = False,
    block_shape: Sequence[int] | None = None,
    a1_gscale: Tensor | None = None,
    a2_gscale: Tensor | None = None,
    g1_alphas: Tensor | None = None,
    g2_alphas: Tensor | None = None,
    *,
    gemm1_alpha: float | None = None,
    gemm1_beta: float | None = None,
    gemm1_clamp_limit: float | None = None,
) -> FusedMoEQuantConfig:
    """fp8 (e4m3) weights and activations.

    Args:
        w1_scale, w2_scale: multiply. [num_experts] per tensor, [num_experts, rows] or
            [num_experts, rows, 1] with per_out_ch_quant, [num_experts, row blocks, K blocks] with block_shape.
        a1_scale, a2_scale: static float32 scales that multiply a code back to a value; None: dynamic.
        w1_bias, w2_bias: [num_experts, rows], float.
        per_act_token_quant: one activation scale per token.
        per_out_ch_quant: one weight scale per output channel.
        block_shape: [rows, columns] of a weight block, e.g. [128, 128]; activations then have one
            scale per token and that many columns. Excludes both flags.
        a1_gscale, a2_gscale: 1 / a1_scale and 1 / a2_scale: multiply an activation before it is quantized.
        g1_alphas, g2_alphas: float32 [num_experts], weight scale * input scale: multiply an accumulator.
        gemm1_alpha, gemm1_beta, gemm1_clamp_limit: constants of the activation; None: its own.
    """
    require_tensors("fp8_w8a8_moe_quant_config", w1_scale=w1_scale, w2_scale=w2_scale)
    return FusedMoEQuantConfig.make(
        FP8,
        per_act_token_quant,
        per_out_ch_quant,
        block_shape,
        w1_scale=w1_scale,
        w2_scale=w2_scale,
        a1_scale=a1_scale,
        a2_scale=a2_scale,
        g1_alphas=g1_alphas,
        g2_alphas=g2_alphas,
        a1_gscale=a1_gscale,
        a2_gscale=a2_gscale,
        w1_bias=w1_bias,
        w2_bias=w2_bias,
        gemm1_alpha=gemm1_alpha,
        gemm1_beta=gemm1_beta,
        gemm1_clamp_limit=gemm1_clamp_limit,
    )


def fp8_w8a16_moe_quant_config(
    w1_scale: Tensor,
    w2_scale: Tensor,
    block_shape: Sequence[int] | None = None,
    *,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    gemm1_alpha: float | None = None,
    gemm1_beta: float | None = None,
    gemm1_clamp_limit: float | None = None,
) -> FusedMoEQuantConfig:
    """fp8 (e4m3) weights, activations not quantized.

    Args:
        w1_scale, w2_scale: multiply. [num_experts], per channel [num_experts, rows(, 1)], or
            [num_experts, row blocks, K blocks] with block_shape.
        block_shape: [rows, columns] of a weight block; the config's `block_shape` reports it.
        w1_bias, w2_bias: [num_experts, rows], float.
        gemm1_alpha, gemm1_beta, gemm1_clamp_limit: constants of the activation; None: its own.
    """
    require_tensors("fp8_w8a16_moe_quant_config", w1_scale=w1_scale, w2_scale=w2_scale)
    return FusedMoEQuantConfig.make(
        None,
        block_shape=block_shape,
        w1_scale=w1_scale,
        w2_scale=w2_scale,
        weight_dtype=FP8,
        w1_bias=w1_bias,
        w2_bias=w2_bias,
        gemm1_alpha=gemm1_alpha,
        gemm1_beta=gemm1_beta,
        gemm1_clamp_limit=gemm1_clamp_limit,
    )


def nvfp4_moe_quant_config(
    g1_alphas: Tensor,
    g2_alphas: Tensor,
    a1_gscale: Tensor | None,
    a2_gscale: Tensor | None,
    w1_scale: Tensor,
    w2_scale: Tensor,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    is_nvfp4_scale_swizzled: bool = True,
    *,
    is_scale_swizzled: bool | None = None,
    gemm1_alpha: float | None = None,
    gemm1_beta: float | None = None,
    gemm1_clamp_limit: float | None = None,
) -> FusedMoEQuantConfig:
    """nvfp4 weights and activations: e2m1 codes, an e4m3 scale per 16 along K, a float32 factor.

    Args:
        g1_alphas: float32 [num_experts], or [num_experts, 2] where gate and up differ; multiplies the
            accumulator. Without a1_gscale: weight_scale_2. With it: input scale * weight_scale_2 for kernels
            that multiply fp4, weight_scale_2 alone for an emulation; the config does not tell which.
        g2_alphas: the same for the second GEMM, [num_experts].
        a1_gscale, a2_gscale: float32 [] or [num_experts], 1 / input scale; multiply an activation
            before it is quantized. None for both: dynamic, one per token.
        w1_scale, w2_scale: float8_e4m3fn, multiply: [num_experts, rows, K / 16], or swizzled; where the
            shape fits both, the config does not tell which.
        w1_bias, w2_bias: [num_experts, rows], float.
        is_nvfp4_scale_swizzled: whether scales of activations are written in the 128x4 layout.
        is_scale_swizzled: the later name of is_nvfp4_scale_swizzled.
        gemm1_alpha, gemm1_beta, gemm1_clamp_limit: constants of the activation; None: its own.
    """
    required = {"g1_alphas": g1_alphas, "g2_alphas": g2_alphas, "w1_scale": w1_scale, "w2_scale": w2_scale}
    require_tensors("nvfp4_moe_quant_config", **required)
    return FusedMoEQuantConfig.make(
        "nvfp4",
        w1_scale=w1_scale,
        w2_scale=w2_scale,
        g1_alphas=g1_alphas,
        g2_alphas=g2_alphas,
        a1_gscale=a1_gscale,
        a2_gscale=a2_gscale,
        w1_bias=w1_bias,
        w2_bias=w2_bias,
        is_nvfp4_scale_swizzled=is_nvfp4_scale_swizzled,
        is_scale_swizzled=is_scale_swizzled,
        gemm1_alpha=gemm1_alpha,
        gemm1_beta=gemm1_beta,
        gemm1_clamp_limit=gemm1_clamp_limit,
    )


def nvfp4_w4a16_moe_quant_config(
    g1_alphas: Tensor,
    g2_alphas: Tensor,
    w1_scale: Tensor,
    w2_scale: Tensor,
    *,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    gemm1_alpha: float | None = None,
    gemm1_beta: float | None = None,
    gemm1_clamp_limit: float | None = None,
) -> FusedMoEQuantConfig:
    """nvfp4 weights, activations not quantized.

    Args:
        g1_alphas: weight_scale_2, float32 [num_experts], or [num_experts, 2] where gate and up differ; multiplies.
        g2_alphas: the same for w2, [num_experts].
        w1_scale, w2_scale: as in `nvfp4_moe_quant_config`.
        w1_bias, w2_bias: [num_experts, rows], float.
        gemm1_alpha, gemm1_beta, gemm1_clamp_limit: constants of the activation; None: its own.
    """
    required = {"g1_alphas": g1_alphas, "g2_alphas": g2_alphas, "w1_scale": w1_scale, "w2_scale": w2_scale}
    require_tensors("nvfp4_w4a16_moe_quant_config", **required)
    return FusedMoEQuantConfig.make(
        None,
        w1_scale=w1_scale,
        w2_scale=w2_scale,
        g1_alphas=g1_alphas,
        g2_alphas=g2_alphas,
        w1_bias=w1_bias,
        w2_bias=w2_bias,
        weight_dtype="nvfp4",
        gemm1_alpha=gemm1_alpha,
        gemm1_beta=gemm1_beta,
        gemm1_clamp_limit=gemm1_clamp_limit,
    )


def biased_moe_quant_config(
    w1_bias: Tensor | None,
    w2_bias: Tensor | None,
    *,
    gemm1_alpha: float | None = None,
    gemm1_beta: float | None = None,
    gemm1_clamp_limit: float | None = None,
) -> FusedMoEQuantConfig:
    """Unquantized weights and activations with biases.

    Args:
        w1_bias: [num_experts, rows of w13], float, added to the first GEMM; None where only w2 has one.
        w2_bias: [num_experts, hidden_size], float, added to an expert's output before it is weighted.
        gemm1_alpha, gemm1_beta, gemm1_clamp_limit: constants of the activation; None: its own.
    """
    given = w2_bias if w1_bias is None else w1_bias
    require_tensors("biased_moe_quant_config", w1_bias=given)
    return FusedMoEQuantConfig.make(
        None,
        w1_bias=w1_bias,
        w2_bias=w2_bias,
        gemm1_alpha=gemm1_alpha,
        gemm1_beta=gemm1_beta,
        gemm1_clamp_limit=gemm1_clamp_limit,
    )


FUSED_MOE_UNQUANTIZED_CONFIG = FusedMoEQuantConfig(
    FusedMoEQuantDesc(), FusedMoEQuantDesc(), FusedMoEQuantDesc(), FusedMoEQuantDesc()
)
"""Nothing quantized, no biases. Frozen, so that sharing it is safe."""
