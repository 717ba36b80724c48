"""Builders for MX weights: e2m1, e3m2, e2m3 or e4m3 elements with one e8m0 scale per 32 along K."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torch_moe_ops.config._require import require
from torch_moe_ops.config.builders_float import require_tensors
from torch_moe_ops.config.formats import FP8, OCP_MX_DTYPES, QuantDType, canonical_dtype
from torch_moe_ops.config.quant_config import FusedMoEQuantConfig


def mxfp4_w4a16_moe_quant_config(
    w1_scale: Any,
    w2_scale: Any,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    gemm1_alpha: float | None = None,
    gemm1_beta: float | None = None,
    gemm1_clamp_limit: float | None = None,
) -> FusedMoEQuantConfig:
    """mxfp4 weights, activations not quantized (gpt-oss).

    Args:
        w1_scale, w2_scale: e8m0 bytes (uint8 or float8_e8m0fnu) [num_experts, rows, K / 32],
            multiply; or a PrecisionConfig.
        w1_bias, w2_bias: [num_experts, rows], float.
        gemm1_alpha, gemm1_beta, gemm1_clamp_limit: constants of the activation; None: its own, which
            are gpt-oss's only for "swigluoai".
    """
    require_tensors("mxfp4_w4a16_moe_quant_config", w1_scale=w1_scale, w2_scale=w2_scale)
    return FusedMoEQuantConfig.make(
        None,
        w1_scale=w1_scale,
        w2_scale=w2_scale,
        w1_bias=w1_bias,
        w2_bias=w2_bias,
        weight_dtype="mxfp4",
        gemm1_alpha=gemm1_alpha,
        gemm1_beta=gemm1_beta,
        gemm1_clamp_limit=gemm1_clamp_limit,
    )


def mxfp4_mxfp8_moe_quant_config(
    w1_scale: Any,
    w2_scale: Any,
    a1_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    block_shape: Sequence[int] | None = None,
    gemm1_alpha: float | None = None,
    gemm1_beta: float | None = None,
    gemm1_clamp_limit: float | None = None,
    mx_alignment: int = 0,
    *,
    is_scale_swizzled: bool | None = None,
) -> FusedMoEQuantConfig:
    """mxfp4 weights, mxfp8 activations (e4m3 with a dynamic e8m0 scale per 32).

    Args:
        w1_scale, w2_scale: e8m0 bytes [num_experts, rows, K / 32], multiply; or a PrecisionConfig.
        a1_scale, a2_scale: must be None: mxfp8 scales are computed from each block.
        w1_bias, w2_bias: [num_experts, rows], float.
        block_shape: None or [1, 32], which both formats fix.
        gemm1_alpha, gemm1_beta, gemm1_clamp_limit: constants of the activation; None: its own.
        mx_alignment: K of the activations is padded to a multiple of this (a multiple of 32); 0: not padded.
        is_scale_swizzled: whether scales of activations are written in the 128x4 layout; None: they are.
    """
    require_tensors("mxfp4_mxfp8_moe_quant_config", w1_scale=w1_scale, w2_scale=w2_scale)
    return FusedMoEQuantConfig.make(
        "mxfp8",
        block_shape=block_shape,
        w1_scale=w1_scale,
        w2_scale=w2_scale,
        a1_scale=a1_scale,
        a2_scale=a2_scale,
        w1_bias=w1_bias,
        w2_bias=w2_bias,
        weight_dtype="mxfp4",
        gemm1_alpha=gemm1_alpha,
        gemm1_beta=gemm1_beta,
        gemm1_clamp_limit=gemm1_clamp_limit,
        mx_alignment=mx_alignment,
        is_scale_swizzled=is_scale_swizzled,
    )


def mxfp4_w4a8_moe_quant_config(
    w1_scale: Any,
    w2_scale: Any,
    a1_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    block_shape: Sequence[int] | None = None,
    *,
    gemm1_alpha: float | None = None,
    gemm1_beta: float | None = None,
    gemm1_clamp_limit: float | None = None,
) -> FusedMoEQuantConfig:
    """mxfp4 weights, fp8 (e4m3) activations with float32 scales.

    Args:
        w1_scale, w2_scale: e8m0 bytes [num_experts, rows, K / 32], multiply; or a PrecisionConfig.
        a1_scale, a2_scale: static float32 scales, multiply a code back to a value; None: dynamic,
            one per token.
        w1_bias, w2_bias: [num_experts, rows], float.
        block_shape: None or [1, 32], the weights' block. Activations have no blocks: fp8 beside mxfp4
            weights has a scale per token, or a static one.
        gemm1_alpha, gemm1_beta, gemm1_clamp_limit: constants of the activation; None: its own.
    """
    require_tensors("mxfp4_w4a8_moe_quant_config", w1_scale=w1_scale, w2_scale=w2_scale)
    return FusedMoEQuantConfig.make(
        FP8,
        per_act_token_quant=a1_scale is None and a2_scale is None,
        block_shape=block_shape,
        w1_scale=w1_scale,
        w2_scale=w2_scale,
        a1_scale=a1_scale,
        a2_scale=a2_scale,
        w1_bias=w1_bias,
        w2_bias=w2_bias,
        weight_dtype="mxfp4",
        gemm1_alpha=gemm1_alpha,
        gemm1_beta=gemm1_beta,
        gemm1_clamp_limit=gemm1_clamp_limit,
    )


def mxfp4_moe_quant_config(
    w1_scale: Any,
    w2_scale: Any,
    *,
    gemm1_alpha: float | None = None,
    gemm1_beta: float | None = None,
    gemm1_clamp_limit: float | None = None,
) -> FusedMoEQuantConfig:
    """mxfp4 weights and activations, one e8m0 scale per 32 in both.

    Args:
        w1_scale, w2_scale: e8m0 bytes [num_experts, rows, K / 32], multiply; or a PrecisionConfig.
        gemm1_alpha, gemm1_beta, gemm1_clamp_limit: constants of the activation; None: its own.
    """
    require_tensors("mxfp4_moe_quant_config", w1_scale=w1_scale, w2_scale=w2_scale)
    return FusedMoEQuantConfig.make(
        "mxfp4",
        w1_scale=w1_scale,
        w2_scale=w2_scale,
        gemm1_alpha=gemm1_alpha,
        gemm1_beta=gemm1_beta,
        gemm1_clamp_limit=gemm1_clamp_limit,
    )


def ocp_mx_moe_quant_config(
    quant_dtype: QuantDType,
    w1_scale: Any,
    w2_scale: Any,
    weight_dtype: QuantDType = None,
    a1_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    block_shape: Sequence[int] | None = None,
    gemm1_alpha: float | None = None,
    gemm1_beta: float | None = None,
    gemm1_clamp_limit: float | None = None,
) -> FusedMoEQuantConfig:
    """Any pair of OCP MX formats.

    Args:
        quant_dtype: activations: "mxfp4", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp8", or None (weight-only).
        w1_scale, w2_scale: e8m0 bytes [num_experts, rows, K / 32], multiply.
        weight_dtype: weights, one of the same names; None: the same as quant_dtype.
        a1_scale, a2_scale: must be None: MX activation scales are computed from each block.
        w1_bias, w2_bias: [num_experts, rows], float.
        block_shape: None or [1, 32], which the formats fix.
        gemm1_alpha, gemm1_beta, gemm1_clamp_limit: constants of the activation; None: its own.
    """
    owner = "ocp_mx_moe_quant_config"
    require_tensors(owner, w1_scale=w1_scale, w2_scale=w2_scale)
    act = canonical_dtype(quant_dtype, owner, "quant_dtype")
    weight = act if weight_dtype is None else canonical_dtype(weight_dtype, owner, "weight_dtype")
    names = ", ".join(OCP_MX_DTYPES)
    require(act is None or act in OCP_MX_DTYPES, owner, "quant_dtype", f"be None or one of {names}", act)
    require(weight in OCP_MX_DTYPES, owner, "weight_dtype", f"be one of {names}", weight)
    return FusedMoEQuantConfig.make(
        act,
        block_shape=block_shape,
        w1_scale=w1_scale,
        w2_scale=w2_scale,
        a1_scale=a1_scale,
        a2_scale=a2_scale,
        w1_bias=w1_bias,
        w2_bias=w2_bias,
        weight_dtype=weight,
        gemm1_alpha=gemm1_alpha,
        gemm1_beta=gemm1_beta,
        gemm1_clamp_limit=gemm1_clamp_limit,
    )
