"""act_format="auto" of the plug-ins: activations as the checkpoint quantizes them only where that multiplies faster.

Elsewhere the kernels emulate the format: they quantize, decode and multiply in 16 bits, which costs accuracy and time.
"""

from __future__ import annotations

import dataclasses

from torch_moe_ops.backends.explain import explain_problem
from torch_moe_ops.backends.registry import Problem

# Activation formats whose codes a backend hands to matrix instructions of that format.
MULTIPLIES: dict[str, frozenset[str]] = {
    "flashinfer_trtllm": frozenset({"nvfp4", "mxfp8", "fp8"}),
    "flashinfer_cutlass": frozenset({"nvfp4", "mxfp8", "fp8"}),
    "cuda_sm90_packed": frozenset({"fp8"}),
    "cuda_sm90_folded": frozenset({"fp8"}),
    "cuda_sm90_fp8": frozenset({"fp8"}),
    "triton_fp8": frozenset({"fp8"}),
    "cpu": frozenset({"int8"}),
}


def auto_act_format(problem: Problem, requested: str = "auto") -> str:
    """`problem.act_format`, the checkpoint's, where the chosen backend multiplies it natively; else "none".

    Args:
        problem: with the checkpoint's activation format.
        requested: the backend that `prepare` will be asked for: a name, or "auto".
    """
    if problem.act_format == "none":
        return "none"
    chosen = explain_problem(problem, requested).chosen
    if chosen is not None and problem.act_format in MULTIPLIES.get(chosen, ()):
        return problem.act_format
    weight_only = dataclasses.replace(problem, act_format="none", input_scale="none")
    # A backend that was asked for may have nothing but the checkpoint's format.
    return "none" if explain_problem(weight_only, requested).chosen is not None else problem.act_format
