"""The instruction set of the C++ kernels."""

from __future__ import annotations

import torch

from torch_moe_ops.core import extension


def cpu_isa() -> str:
    """Its name, and why it is not AMX where AMX is missing; empty where there are no kernels."""
    if not extension.has_cpu_extension():
        return ""
    isa = str(torch.ops.moeq_C.cpu_isa())
    if isa == "amx" or not hasattr(torch.ops.moeq_C, "cpu_isa_refusal"):
        return isa
    refusal = torch.ops.moeq_C.cpu_isa_refusal("amx")
    return f"{isa} (no amx: {refusal})" if refusal else f"{isa} (asked for; amx, matrix tiles, is there)"


def cpu_integer_isa() -> str:
    """The instructions that multiply integer weights and int8 activations; empty where no kernels do."""
    if not extension.has_cpu_extension() or not hasattr(torch.ops.moeq_C, "cpu_integer_isa"):
        return ""
    return str(torch.ops.moeq_C.cpu_integer_isa())
