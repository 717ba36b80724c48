"""Backend `flashinfer_cutlass`: FlashInfer's CUTLASS kernels, for Ada to Blackwell.

Verified by contract, like `flashinfer_trtllm`. Routing is moeq::route's; the kernels take ids and weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_moe_ops.backends.flashinfer_trtllm import device_guard
from torch_moe_ops.backends.registry import Backend, Problem, Requirement, formats, register
from torch_moe_ops.flashinfer import cutlass_call, limits, package
from torch_moe_ops.flashinfer.activations import NAMES
from torch_moe_ops.flashinfer.cutlass_layout import LAYER, RULES
from torch_moe_ops.ops.call import ExpertsCall

_BLACKWELL = ((10, 0), (10, 3), (11, 0), (12, 0), (12, 1))
_FROM_ADA = ((8, 9), (9, 0), *_BLACKWELL)
CAPABILITIES = {"none": _FROM_ADA, "fp8": _FROM_ADA, "fp8_block": ((9, 0),), "nvfp4": _BLACKWELL, "mxfp4": _BLACKWELL}

FORMATS: dict[str, tuple[str, ...]] = {
    "nvfp4": ("nvfp4",),
    "mxfp4": ("mxfp8",),
    "fp8": ("fp8",),
    "fp8_block": ("fp8",),
    "none": ("none",),
}

ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "nvfp4": ("silu", "relu2_no_mul"),
    "mxfp4": ("silu", "swigluoai"),
    "fp8": ("silu", "relu2_no_mul"),
    "fp8_block": ("silu",),
    "none": ("silu", "swigluoai", "relu2_no_mul"),
}


def _capabilities(problem: Problem) -> limits.Capabilities:
    return CAPABILITIES.get(problem.scheme, _FROM_ADA)


def _constants_unmet(problem: Problem) -> str | None:
    if problem.constants is None or problem.scheme in ("none", "mxfp4"):
        return None
    return f"constants must be (1, 0, inf) for {problem.scheme} kernels, got {problem.constants}"


def _alphas_unmet(problem: Problem) -> str | None:
    if problem.scheme != "nvfp4" or not problem.per_half_alphas:
        return None
    return "per_half_alphas must be False: the kernels have one alpha for gate and up, got True"


def _placement_unmet(problem: Problem) -> str | None:
    """Ranks of expert parallelism own equal, consecutive ranges: there is no argument for an offset."""
    local, offset, total = problem.num_local_experts, problem.local_expert_offset, problem.num_experts
    if total % local == 0 and offset % local == 0:
        return None
    return f"local_expert_offset and num_experts must be multiples of the {local} local experts, got {offset}, {total}"


def _notes(problem: Problem) -> str:
    if problem.scheme not in RULES:
        return ""
    said = ["by contract, not run on a GPU"]
    padded = RULES[problem.scheme].padded(problem.hidden_size, problem.intermediate_size)
    said.append(limits.sizes_noted(problem, *padded))
    if problem.input_scale == "expert":
        said.append("takes the largest input scale for all experts")
    if limits.can_import(problem) and "use_fused_finalize" not in package.entry(cutlass_call.FUNCTION).parameters:
        said.append(f"not deterministic: flashinfer {package.installed_version()} cannot finalize without atomics")
    return "; ".join(s for s in said if s)


def run(call: ExpertsCall, out: Tensor) -> None:
    """cutlass_fused_moe."""
    with device_guard(out):
        cutlass_call.run(call, out)


_FLOATS = (torch.bfloat16, torch.float16)

register(
    Backend(
        name="flashinfer_cutlass",
        layout=LAYER.layout,
        requires=(
            limits.on_cuda(_capabilities),
            limits.installed(),
            formats(FORMATS),
            limits.has_function(lambda scheme: cutlass_call.FUNCTION),
            limits.activations(ACTIVATIONS),
            limits.has_activation(NAMES),
            Requirement(_constants_unmet),
            limits.calibrated(),
            limits.weight_scales("tensor"),
            Requirement(_alphas_unmet),
            limits.no_bias(("nvfp4", "fp8", "fp8_block", "none")),
            limits.hidden_dtype({"none": _FLOATS}),
            Requirement(_placement_unmet),
        ),
        prepare=LAYER.prepare,
        restore=LAYER.restore,
        run=run,
        bias_layout=LAYER.biases,
        one_input_scale=True,
        # Its first call compiles for an hour or so: chosen unasked only where nothing else fits.
        auto=False,
        notes=_notes,
        verified=lambda problem: "by contract",
    )
)
