"""Backend `flashinfer_cutlass`: FlashInfer's CUTLASS kernels, for Ada to Blackwell.

Verified by contract, like `flashinfer_trtllm`, and on a Hopper GPU for what `_RUN_ON_HOPPER` names
(tests/backends/flashinfer/test_flashinfer_sm90.py). Routing is moeq::route's; the kernels take ids and weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_moe_ops.backends.flashinfer import cutlass_call, limits, package
from torch_moe_ops.backends.flashinfer.activations import NAMES
from torch_moe_ops.backends.flashinfer.cutlass_layout import LAYER, RULES
from torch_moe_ops.backends.flashinfer_trtllm import device_guard
from torch_moe_ops.backends.registry import Backend, Requirement, formats, register
from torch_moe_ops.backends.tested import was_run
from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.core.problem import STANDARD, Problem

_BLACKWELL = ((10, 0), (10, 3), (11, 0), (12, 0), (12, 1))
_FROM_ADA = ((8, 9), (9, 0), *_BLACKWELL)
CAPABILITIES = {
    "none": _FROM_ADA,
    "fp8": _FROM_ADA,
    "fp8_block": ((9, 0),),
    "nvfp4": _BLACKWELL,
    "mxfp4": _BLACKWELL,
    "mxfp8": ((10, 0), (10, 3)),
}

FORMATS: dict[str, tuple[str, ...]] = {
    "nvfp4": ("nvfp4",),
    "mxfp4": ("mxfp8",),
    "mxfp8": ("mxfp8",),
    "fp8": ("fp8",),
    "fp8_block": ("fp8",),
    "none": ("none",),
}

# One activation kernel stands between the GEMMs of every scheme, so that all have the same.
_GATED = ("silu", "swigluoai", "gelu", "gelu_tanh", "swiglustep", "situ")
_PLAIN = ("silu_no_mul", "gelu_no_mul", "relu2_no_mul", "identity_no_mul")
ACTIVATIONS: dict[str | tuple[str, str], tuple[str, ...]] = dict.fromkeys(FORMATS, _GATED + _PLAIN)


def _capabilities(problem: Problem) -> limits.Capabilities:
    return CAPABILITIES.get(problem.scheme, _FROM_ADA)


def _function(problem: Problem) -> str | None:
    return cutlass_call.FUNCTION if problem.scheme in FORMATS else None


def _needs_situ(problem: Problem) -> str | None:
    return _function(problem) if problem.activation == "situ" else None


def _quantizes_to_nvfp4(problem: Problem) -> str | None:
    return _function(problem) if problem.act_format == "nvfp4" else None


def _mixed_unmet(problem: Problem) -> str | None:
    if (problem.scheme, problem.act_format) != ("mxfp4", "none"):
        return None
    return "act_format must not be 'none': kernels for it run on 9.0 alone and read weights interleaved in another way"


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


_SHARED = {107: 100, 110: 100, 121: 120}  # devices that take another one's module


def _module(problem: Problem) -> str | None:
    """The compiled module that serves a device."""
    if problem.capability is None:
        return None
    number = problem.capability[0] * 10 + problem.capability[1]
    return f"fused_moe_{_SHARED.get(number, number)}"


def _notes(problem: Problem) -> str:
    if problem.scheme not in RULES:
        return ""
    ran = was_run("flashinfer_cutlass", problem.scheme, problem.act_format, problem.device, problem.capability)
    said = [] if ran else ["by contract, not run on such a GPU"]
    padded = RULES[problem.scheme].padded(problem.hidden_size, problem.intermediate_size)
    said.append(limits.sizes_noted(problem, *padded))
    if problem.input_scale == "expert":
        said.append("takes the largest input scale for all experts")
    built = _module(problem)
    if built is not None and limits.can_import(problem) and not package.is_built(built):
        said.append(f"the first call compiles {built}, which takes an hour or more")
    said.append("rounds what each GEMM gives to the dtype of the output")
    if problem.has_bias:
        said.append("rounds biases to the dtype of the output")
    if limits.can_import(problem) and "use_fused_finalize" not in package.entry(cutlass_call.FUNCTION).parameters:
        said.append(f"not deterministic: flashinfer {package.installed_version()} cannot finalize without atomics")
    said.append(limits.release_noted())
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
            Requirement(_mixed_unmet),
            limits.has_function(_function),
            limits.activations(ACTIVATIONS),
            limits.has_activation(NAMES),
            limits.has_parameter("situ_beta", _needs_situ, "activation 'situ'"),
            limits.calibrated(("nvfp4", "fp8"), "the kernels quantize with one static scale a GEMM"),
            limits.usual_nvfp4(_quantizes_to_nvfp4),
            limits.one_input_scale(),
            limits.weight_scales("tensor"),
            Requirement(_alphas_unmet),
            limits.hidden_dtype({"none": _FLOATS}),
            Requirement(_placement_unmet),
        ),
        prepare=LAYER.prepare,
        restore=LAYER.restore,
        run=run,
        bias_layout=LAYER.biases,
        one_input_scale=True,
        # Its first call may compile for an hour: chosen unasked only where nothing else fits.
        auto=False,
        accuracy=STANDARD,
        of_the_field=True,
        notes=_notes,
    )
)
