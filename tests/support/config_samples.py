"""One valid call of every builder, on a layer of 3 experts, hidden size 64, intermediate size 96."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_moe_ops import config as moe_config

EXPERTS, HIDDEN, INTER = 3, 64, 96
FP8 = torch.float8_e4m3fn


def layer_config(**changes: Any) -> moe_config.FusedMoEConfig:
    """The layer's config on one rank, with other fields as asked."""
    fields: dict[str, Any] = {
        "num_experts": EXPERTS,
        "experts_per_token": 2,
        "hidden_dim": HIDDEN,
        "intermediate_size_per_partition": INTER,
        "num_local_experts": EXPERTS,
        "num_logical_experts": EXPERTS,
        "activation": "silu",
        "device": "cpu",
        "routing_method": moe_config.RoutingMethodType.Renormalize,
        "moe_parallel_config": moe_config.FusedMoEParallelConfig.make_no_parallel(),
        "in_dtype": torch.bfloat16,
    }
    return moe_config.FusedMoEConfig(**{**fields, **changes})


def blocks(row: int, col: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Linear scales of w13 [E, 2I, H] and w2 [E, H, I] for blocks (row, col)."""
    shapes = ((2 * INTER, HIDDEN), (HIDDEN, INTER))
    w1, w2 = (torch.ones(EXPERTS, -(-n // row), -(-k // col)).to(dtype) for n, k in shapes)
    return w1, w2


def per_expert(*shape: int) -> Tensor:
    return torch.ones(EXPERTS, *shape)


def biases(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    return {
        "w1_bias": torch.zeros(EXPERTS, 2 * INTER, dtype=dtype),
        "w2_bias": torch.zeros(EXPERTS, HIDDEN, dtype=dtype),
    }


def scales(row: int, col: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    w1, w2 = blocks(row, col, dtype)
    return {"w1_scale": w1, "w2_scale": w2}


def zero_points(col: int) -> dict[str, Tensor]:
    w1, w2 = blocks(1, col, torch.uint8)
    return {"w1_zp": w1, "w2_zp": w2}


def alphas() -> dict[str, Tensor]:
    return {"g1_alphas": per_expert(2), "g2_alphas": per_expert()}


def gscales() -> dict[str, Tensor]:
    return {"a1_gscale": torch.ones(()), "a2_gscale": per_expert()}


def static() -> dict[str, Tensor]:
    return {"a1_scale": torch.ones(1), "a2_scale": torch.ones(())}


def constants() -> dict[str, float]:
    return {"gemm1_alpha": 1.702, "gemm1_beta": 1.0, "gemm1_clamp_limit": 7.0}


def mx() -> dict[str, Tensor]:
    return scales(1, 32, torch.uint8)


def channel() -> dict[str, Tensor]:
    return {"g1_alphas": per_expert(2 * INTER, 1), "g2_alphas": per_expert(HIDDEN, 1)}


# Every argument is given a value that a builder could lose, unless two exclude one another.
CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "fp8_w8a8_moe_quant_config": lambda: {
        "w1_scale": per_expert(),
        "w2_scale": per_expert(),
        **static(),
        **biases(),
        **gscales(),
        "g1_alphas": per_expert(),
        "g2_alphas": per_expert(),
    },
    "int8_w8a8_moe_quant_config": lambda: {
        "w1_scale": per_expert(2 * INTER, 1),
        "w2_scale": per_expert(HIDDEN, 1),
        "a1_scale": None,
        "a2_scale": None,
        **biases(),
        "per_act_token_quant": True,
    },
    "gptq_marlin_moe_quant_config": lambda: {
        **scales(1, 32, torch.bfloat16),
        "weight_bits": 4,
        "group_size": 32,
        **zero_points(32),
        **biases(),
    },
    "awq_marlin_moe_quant_config": lambda: {
        **scales(1, 32, torch.float16),
        **zero_points(32),
        "weight_bits": 8,
        "group_size": 32,
        **biases(),
    },
    "mxfp4_w4a16_moe_quant_config": lambda: {**mx(), **biases(), **constants()},
    "mxfp4_mxfp8_moe_quant_config": lambda: {
        **mx(),
        **biases(),
        "block_shape": [1, 32],
        **constants(),
        "mx_alignment": 256,
    },
    "mxfp4_w4a8_moe_quant_config": lambda: {**mx(), **biases(), **static(), "block_shape": [1, 32]},
    "ocp_mx_moe_quant_config": lambda: {
        "quant_dtype": "mxfp6_e3m2",
        **mx(),
        "weight_dtype": "mxfp4",
        **biases(),
        "block_shape": [1, 32],
        **constants(),
    },
    "nvfp4_moe_quant_config": lambda: {
        **alphas(),
        **gscales(),
        **scales(1, 16, FP8),
        **biases(),
        "is_nvfp4_scale_swizzled": False,
    },
    "mxfp4_moe_quant_config": mx,
    "nvfp4_w4a16_moe_quant_config": lambda: {**alphas(), **scales(1, 16, FP8), **biases()},
    "int4_w4a16_moe_quant_config": lambda: {
        **scales(1, 32, torch.bfloat16),
        **zero_points(32),
        "block_shape": [0, 32],
        **biases(),
    },
    "fp8_w8a16_moe_quant_config": lambda: {**scales(128, 128), "block_shape": [128, 128]},
    "int8_w8a16_moe_quant_config": lambda: {**scales(1, 32), **zero_points(32), "block_shape": [0, 32]},
    "int4_w4afp8_moe_quant_config": lambda: {
        **scales(1, 32, FP8),
        **channel(),
        "per_act_token_quant": True,
        "per_out_ch_quant": True,
        "block_shape": [1, 32],
    },
    "biased_moe_quant_config": biases,
}


def build(name: str, **changes: Any) -> moe_config.FusedMoEQuantConfig:
    """The builder's sample config, with some arguments changed."""
    config: moe_config.FusedMoEQuantConfig = getattr(moe_config, name)(**{**CALLS[name](), **changes})
    return config
