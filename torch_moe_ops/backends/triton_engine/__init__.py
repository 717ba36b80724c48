"""Triton kernels of the `triton` backends: prologue, two grouped GEMMs, combine; and the router's.

Importing a module with kernels imports Triton; `backends/triton.py` does so on first use.
"""
