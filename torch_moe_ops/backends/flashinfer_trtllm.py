"""Backend `flashinfer_trtllm`: FlashInfer's TRTLLM-gen kernels for Blackwell (SM100 and SM103).

Verified by contract: FlashInfer's own Python front runs in the tests, and a simulator of the compiled module
checks what reaches it. It cannot show that the kernels compute what their interface says.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from torch_moe_ops.backends.registry import Backend, Problem, Requirement, formats, register
from torch_moe_ops.flashinfer import limits, trtllm_call
from torch_moe_ops.flashinfer.activations import NAMES
from torch_moe_ops.flashinfer.routing import MAX_EXPERTS, MAX_TOP_K
from torch_moe_ops.flashinfer.trtllm_layout import LAYER, RULES
from torch_moe_ops.ops.call import ExpertsCall

CAPABILITIES = ((10, 0), (10, 3))

FORMATS: dict[str, tuple[str, ...]] = {
    "nvfp4": ("nvfp4",),
    "mxfp4": ("none", "mxfp8"),
    "mxint4": ("none",),
    "fp8": ("fp8",),
    "fp8_block": ("fp8",),
    "none": ("none",),
}

ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "nvfp4": ("silu", "gelu", "swiglustep", "relu2_no_mul", "identity_no_mul"),
    "mxfp4": ("silu", "swigluoai"),
    "mxint4": ("silu", "swigluoai"),
    "fp8": ("silu", "relu2_no_mul"),
    "fp8_block": ("silu",),
    "none": ("silu", "swigluoai", "relu2_no_mul"),
}


def _constants_unmet(problem: Problem) -> str | None:
    """The clamp and the factors of an activation, where the kernels can be told them."""
    constants = problem.constants
    if constants is None:
        return None
    limit = constants[2]
    if problem.scheme in ("fp8", "fp8_block"):
        return f"constants must be (1, 0, inf): {problem.scheme} kernels take none, got {constants}"
    if problem.scheme != "nvfp4" or limit == math.inf:
        return None
    # One limit clamps both accumulators before they are scaled, each by the alpha of its half.
    if problem.per_half_alphas:
        return f"per_half_alphas must be False where limit = {limit} clamps both accumulators, got True"
    return None


def _bf16_constants_unmet(problem: Problem) -> str | None:
    if problem.scheme != "none" or problem.constants is None or not limits.can_import(problem):
        return None
    entry = limits.package.entry(trtllm_call.function_name("none", routed=True))
    if "gemm1_alpha" in entry.parameters:
        return None
    version = limits.package.installed_version()
    return f"constants must be (1, 0, inf): bf16 kernels of flashinfer {version} take none, got {problem.constants}"


def _capabilities(problem: Problem) -> tuple[tuple[int, int], ...]:
    # FlashInfer's own tests expect bf16 activations with MXFP4 weights to fail on SM103.
    bf16 = problem.scheme == "mxfp4" and problem.act_format == "none"
    return CAPABILITIES[:1] if bf16 else CAPABILITIES


def _routed_function(scheme: str) -> str | None:
    return trtllm_call.function_name(scheme, routed=True) if scheme in trtllm_call.FAMILIES else None


def _notes(problem: Problem) -> str:
    if problem.scheme not in RULES:
        return ""
    padded = RULES[problem.scheme].padded(problem.hidden_size, problem.intermediate_size)
    said = [limits.sizes_noted(problem, *padded), limits.routing_noted(problem)]
    if problem.input_scale == "expert":
        said.append("takes the largest input scale for all experts")
    return "; ".join(["by contract, not run on SM100", *(s for s in said if s)])


def run(call: ExpertsCall, out: Tensor) -> None:
    """The routed function of the scheme."""
    with device_guard(out):
        trtllm_call.run_routed(call, out)


def run_monolithic(call: ExpertsCall, routing: tuple[object, ...], out: Tensor) -> bool:
    """The function that routes as well, where it can route like that."""
    with device_guard(out):
        return trtllm_call.run_monolithic(call, routing, out)


def device_guard(out: Tensor) -> AbstractContextManager[object]:
    """Makes out's device the current one; FlashInfer launches on that."""
    return torch.cuda.device(out.device) if out.is_cuda else nullcontext()


register(
    Backend(
        name="flashinfer_trtllm",
        layout=LAYER.layout,
        requires=(
            limits.on_cuda(_capabilities),
            limits.installed(),
            formats(FORMATS),
            limits.has_function(_routed_function),
            limits.activations(ACTIVATIONS),
            limits.has_activation(NAMES),
            Requirement(_constants_unmet),
            Requirement(_bf16_constants_unmet, of_machine=True),
            limits.calibrated(),
            limits.weight_scales("tensor", "half"),
            limits.no_bias(("mxint4", "fp8", "fp8_block", "none")),
            limits.hidden_dtype({name: (torch.bfloat16,) for name in ("mxfp4", "mxint4", "none")}),
            limits.at_most("num_experts", MAX_EXPERTS),
            limits.at_most("top_k", MAX_TOP_K),
            limits.even_experts("fp8_block", 4),
        ),
        prepare=LAYER.prepare,
        restore=LAYER.restore,
        run=run,
        run_monolithic=run_monolithic,
        bias_layout=LAYER.biases,
        one_input_scale=True,
        notes=_notes,
        verified=lambda problem: "by contract",
    )
)
