"""Adapters to FlashInfer's MoE kernels: weight layouts, calls, requirements.

Nothing here imports flashinfer before a kernel is called, or asked about on a CUDA device.
"""
