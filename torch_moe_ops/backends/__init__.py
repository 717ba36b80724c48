"""Ways to run the experts: one file a backend, and a folder for what only some of them need.

The order of the imports is the order of preference; adding a backend adds one line here.
"""

from __future__ import annotations

# isort: off
from torch_moe_ops.backends import flashinfer_trtllm
from torch_moe_ops.backends import flashinfer_cutlass
from torch_moe_ops.backends import cpu
from torch_moe_ops.backends import cuda_sm90
from torch_moe_ops.backends import cuda_sm90_w4a8
from torch_moe_ops.backends import cuda_sm90_bf16
from torch_moe_ops.backends import triton
from torch_moe_ops.backends import triton_fp8
from torch_moe_ops.backends import cuda_sm90_fp8
from torch_moe_ops.backends import reference

# isort: on
from torch_moe_ops.backends.registry import BACKENDS, Backend, Requirement, register

__all__ = [
    "BACKENDS",
    "Backend",
    "Requirement",
    "cpu",
    "cuda_sm90",
    "cuda_sm90_bf16",
    "cuda_sm90_fp8",
    "cuda_sm90_w4a8",
    "flashinfer_cutlass",
    "flashinfer_trtllm",
    "reference",
    "register",
    "triton",
    "triton_fp8",
]
