"""The configuration objects of the field, under the names that its users know.

Frozen and validated: a wrong value is an error at construction that names the field.
"""

from __future__ import annotations

from torch_moe_ops.config.builders import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    awq_marlin_moe_quant_config,
    biased_moe_quant_config,
    fp8_w8a8_moe_quant_config,
    fp8_w8a16_moe_quant_config,
    gptq_marlin_moe_quant_config,
    int4_w4a16_moe_quant_config,
    int4_w4afp8_moe_quant_config,
    int8_w8a8_moe_quant_config,
    int8_w8a16_moe_quant_config,
    mxfp4_moe_quant_config,
    mxfp4_mxfp8_moe_quant_config,
    mxfp4_w4a8_moe_quant_config,
    mxfp4_w4a16_moe_quant_config,
    nvfp4_moe_quant_config,
    nvfp4_w4a16_moe_quant_config,
    ocp_mx_moe_quant_config,
)
from torch_moe_ops.config.descriptors import FusedMoEQuantDesc, GroupShape
from torch_moe_ops.config.moe import FusedMoEConfig
from torch_moe_ops.config.parallel import ALL2ALL_BACKENDS, FusedMoEParallelConfig
from torch_moe_ops.config.quant_config import FusedMoEQuantConfig
from torch_moe_ops.core.routing_methods import RoutingMethodType, get_routing_method_type

__all__ = [
    "ALL2ALL_BACKENDS",
    "FUSED_MOE_UNQUANTIZED_CONFIG",
    "FusedMoEConfig",
    "FusedMoEParallelConfig",
    "FusedMoEQuantConfig",
    "FusedMoEQuantDesc",
    "GroupShape",
    "RoutingMethodType",
    "awq_marlin_moe_quant_config",
    "biased_moe_quant_config",
    "fp8_w8a8_moe_quant_config",
    "fp8_w8a16_moe_quant_config",
    "get_routing_method_type",
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
