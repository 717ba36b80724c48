"""The sixteen builders of FusedMoEQuantConfig, gathered from one file per family of formats."""

from __future__ import annotations

from torch_moe_ops.config.builders_float import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    biased_moe_quant_config,
    fp8_w8a8_moe_quant_config,
    fp8_w8a16_moe_quant_config,
    nvfp4_moe_quant_config,
    nvfp4_w4a16_moe_quant_config,
)
from torch_moe_ops.config.builders_int import (
    awq_marlin_moe_quant_config,
    gptq_marlin_moe_quant_config,
    int4_w4a16_moe_quant_config,
    int4_w4afp8_moe_quant_config,
    int8_w8a8_moe_quant_config,
    int8_w8a16_moe_quant_config,
)
from torch_moe_ops.config.builders_mx import (
    mxfp4_moe_quant_config,
    mxfp4_mxfp8_moe_quant_config,
    mxfp4_w4a8_moe_quant_config,
    mxfp4_w4a16_moe_quant_config,
    ocp_mx_moe_quant_config,
)

__all__ = [
    "FUSED_MOE_UNQUANTIZED_CONFIG",
    "awq_marlin_moe_quant_config",
    "biased_moe_quant_config",
    "fp8_w8a8_moe_quant_config",
    "fp8_w8a16_moe_quant_config",
    "gptq_marlin_moe_quant_config",
    "int4_w4a16_moe_quant_config",
    "int4_w4afp8_moe_quant_config",
    "int8_w8a8_moe_quant_config",
    "int8_w8a16_moe_quant_config",
    "mxfp4_moe_quant_config",
    "mxfp4_mxfp8_moe_quant_config",
    "mxfp4_w4a8_moe_quant_config",
    "mxfp4_w4a16_moe_quant_config",
    "nvfp4_moe_quant_config",
    "nvfp4_w4a16_moe_quant_config",
    "ocp_mx_moe_quant_config",
]
