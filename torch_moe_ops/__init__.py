"""Quantized Mixture-of-Experts layers for PyTorch, as custom ops `torch.ops.moeq.*`."""

from __future__ import annotations

from torch_moe_ops.core import torch_names as _torch_names  # noqa: F401  it refuses a torch that lacks what we need

# isort: split
from torch_moe_ops import config, ops
from torch_moe_ops.checkpoints import CheckpointError, load_experts
from torch_moe_ops.core.problem import Problem
from torch_moe_ops.core.version import __version__
from torch_moe_ops.expert_parallel.layer import ExpertParallel
from torch_moe_ops.expert_parallel.placement import ExpertPlacement
from torch_moe_ops.host_experts.layer import HostExperts
from torch_moe_ops.ops.codecs import (
    dequantize_fp8,
    dequantize_int4,
    dequantize_int8,
    dequantize_mxfp4,
    dequantize_mxfp8,
    dequantize_nvfp4,
    dynamic_gscale_nvfp4,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
    quantize_mxfp4,
    quantize_mxfp8,
    quantize_nvfp4,
    swizzle_scale,
    unswizzle_scale,
)
from torch_moe_ops.prepared.explaining import explain
from torch_moe_ops.prepared.fused import fused_moe, fused_moe_routed, route
from torch_moe_ops.prepared.linear import grouped_linear
from torch_moe_ops.prepared.lora import Lora
from torch_moe_ops.prepared.merge_aware import MergeAware
from torch_moe_ops.prepared.prepare import prepare
from torch_moe_ops.prepared.prepared_weights import PreparedWeights
from torch_moe_ops.prepared.restoring import restore
from torch_moe_ops.prepared.shared_experts import append_shared_experts
from torch_moe_ops.routing.options import Routing
from torch_moe_ops.weights.merge_lora import merge_lora
from torch_moe_ops.weights.quantize_experts import dequantize_experts, quantize_experts
from torch_moe_ops.weights.raw_weights import RawWeights
from torch_moe_ops.weights.shared_experts import with_shared_experts

__all__ = [
    "CheckpointError",
    "ExpertParallel",
    "ExpertPlacement",
    "HostExperts",
    "Lora",
    "MergeAware",
    "PreparedWeights",
    "Problem",
    "RawWeights",
    "Routing",
    "__version__",
    "append_shared_experts",
    "config",
    "dequantize_experts",
    "dequantize_fp8",
    "dequantize_int4",
    "dequantize_int8",
    "dequantize_mxfp4",
    "dequantize_mxfp8",
    "dequantize_nvfp4",
    "dynamic_gscale_nvfp4",
    "explain",
    "fused_moe",
    "fused_moe_routed",
    "grouped_linear",
    "load_experts",
    "merge_lora",
    "ops",
    "prepare",
    "quantize_experts",
    "quantize_fp8",
    "quantize_int4",
    "quantize_int8",
    "quantize_mxfp4",
    "quantize_mxfp8",
    "quantize_nvfp4",
    "restore",
    "route",
    "swizzle_scale",
    "unswizzle_scale",
    "with_shared_experts",
]
