"""Adapters to FlashInfer's MoE kernels: weight layouts, calls, requirements.

Nothing here imports flashinfer before a kernel is called, or asked about on a CUDA device.
"""

from __future__ import annotations

from torch_moe_ops.flashinfer.warmup import warmup

__all__ = ["warmup"]
