"""Quantized Mixture-of-Experts layers for PyTorch, as custom ops `torch.ops.moeq.*`."""

from __future__ import annotations

from torch_moe_ops import config, ops
from torch_moe_ops._version import __version__
from torch_moe_ops.backends.registry import Problem
from torch_moe_ops.checkpoints import CheckpointError, load_experts
from torch_moe_ops.fused import (
    dynamic_gscale_nvfp4,
    fused_moe,
    fused_moe_routed,
    quantize_nvfp4,
    route,
    swizzle_scale,
    unswizzle_scale,
)
from torch_moe_ops.prepare import explain, prepare, restore
from torch_moe_ops.prepared_weights import PreparedWeights
from torch_moe_ops.quant.nvfp4 import dequantize as dequantize_nvfp4
from torch_moe_ops.quantize_experts import dequantize_experts, quantize_experts
from torch_moe_ops.raw_weights import RawWeights
from torch_moe_ops.routing import Routing

__all__ = [
    "CheckpointError",
    "PreparedWeights",
    "Problem",
    "RawWeights",
    "Routing",
    "__version__",
    "config",
    "dequantize_experts",
    "dequantize_nvfp4",
    "dynamic_gscale_nvfp4",
    "explain",
    "fused_moe",
    "fused_moe_routed",
    "load_experts",
    "ops",
    "prepare",
    "quantize_experts",
    "quantize_nvfp4",
    "restore",
    "route",
    "swizzle_scale",
    "unswizzle_scale",
]
