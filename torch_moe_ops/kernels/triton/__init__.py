"""Triton kernels of the `triton` backend: prologue, two grouped GEMMs, combine.

Importing a module of this package imports Triton; `torch_moe_ops.backends.triton` does so on first use.
"""
