"""Backend `flashinfer_trtllm`: FlashInfer's TRTLLM-gen kernels for Blackwell (SM100 and SM103).

Verified by contract: FlashInfer's own Python front runs in the tests, and a simulator of the compiled module
checks what reaches it. It cannot show that the kernels compute what their interface says.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from torch_moe_ops.backends.flashinfer import limits, package, trtllm_call, trtllm_operands
from torch_moe_ops.backends.flashinfer.activations import NAMES
from torch_moe_ops.backends.flashinfer.routing import FP8_BLOCK_LAUNCHER, MAX_EXPERTS, MAX_TOP_K
from torch_moe_ops.backends.flashinfer.trtllm_layout import LAYER, RULES
from torch_moe_ops.backends.registry import Backend, Requirement, formats, register
from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.core.problem import STANDARD, Problem

CAPABILITIES = ((10, 0), (10, 3))

FORMATS: dict[str, tuple[str, ...]] = {
    "nvfp4": ("nvfp4",),
    "mxfp4": ("none", "mxfp8"),
    "mxfp8": ("mxfp8",),
    "mxint4": ("none",),
    "fp8": ("fp8",),
    "fp8_block": ("fp8",),
    "none": ("none",),
}

ACTIVATIONS: dict[str | tuple[str, str], tuple[str, ...]] = {
    "nvfp4": ("silu", "swigluoai", "gelu", "swiglustep", "relu2_no_mul", "identity_no_mul"),
    ("mxfp4", "none"): ("silu", "swigluoai"),
    ("mxfp4", "mxfp8"): ("silu", "swigluoai", "gelu", "relu2_no_mul"),
    "mxfp8": ("silu", "swigluoai", "gelu", "swiglustep", "relu2_no_mul"),
    "mxint4": ("silu", "swigluoai"),
    "fp8": ("silu", "swiglustep", "relu2_no_mul"),
    "fp8_block": ("silu", "swigluoai"),
    "none": ("silu", "swigluoai", "swiglustep", "relu2_no_mul"),
}


def _situ_unmet(problem: Problem) -> str | None:
    if problem.activation != "situ":
        return None
    return "activation must not be 'situ': for some sizes its first GEMM writes no block scales (flashinfer issue 5053)"


def _constants_unmet(problem: Problem) -> str | None:
    """The clamp and the factors of an activation, where the kernels can be told them."""
    constants = problem.constants
    if constants is None:
        return None
    # One limit clamps both accumulators before they are scaled, each by the scale of its half.
    halves = problem.per_half_alphas or problem.weight_scales == "half"
    if constants[2] != math.inf and problem.scheme in ("nvfp4", "fp8") and halves:
        return f"gate and up must share a scale where limit = {constants[2]} clamps both accumulators, got one for each"
    if problem.scheme == "fp8" and problem.input_scale == "none":
        return f"constants must be (1, 0, inf): fp8 kernels with a scale per token take none, got {constants}"
    if problem.scheme == "fp8" and problem.activation != "swiglustep":
        return f"constants must be (1, 0, inf): fp8 kernels clamp for 'swiglustep' only, got {constants}"
    return None


def _order_unmet(problem: Problem) -> str | None:
    """nvfp4 with a scale per token: when kernels apply it matters wherever they add or clamp, and no source says."""
    if problem.scheme != "nvfp4" or problem.input_scale != "none":
        return None
    if problem.has_bias:
        return f"has_bias must be False: {trtllm_operands.UNKNOWN_ORDER} biases, got True"
    constants = problem.constants
    if constants is None or constants[1:] == (0.0, math.inf):
        return None  # alpha meets the gate in real units, as silu itself does
    return f"constants must have beta 0 and limit inf: {trtllm_operands.UNKNOWN_ORDER} them, got {constants}"


def _takes_constants(problem: Problem) -> str | None:
    """The function that is to be told constants. Those for 4-bit weights could be told always."""
    if problem.constants is None or problem.scheme not in ("none", "fp8", "fp8_block", "mxfp8"):
        return None
    return _routed_function(problem)


def _constants_of(*schemes: str) -> Callable[[Problem], str | None]:
    def what(problem: Problem) -> str | None:
        if problem.constants is None or problem.scheme not in schemes:
            return None
        return f"constants {problem.constants} for {problem.scheme} weights"

    return what


def _newest(problem: Problem) -> str | None:
    """Activations that FlashInfer came to allow for a scheme later than for others."""
    plain = {"none": ("silu", "swigluoai", "relu2_no_mul"), "mxfp8": ("silu", "swigluoai")}
    if problem.activation in plain.get(problem.scheme, (problem.activation,)):
        return None
    return f"activation {problem.activation!r} for {problem.scheme} weights"


def _scales_tokens(problem: Problem) -> str | None:
    dynamic = problem.scheme == "nvfp4" and problem.input_scale == "none"
    return _routed_function(problem) if dynamic else None


def _capabilities(problem: Problem) -> tuple[tuple[int, int], ...]:
    # FlashInfer's own tests expect bf16 activations with MXFP4 weights to fail on SM103.
    bf16 = problem.scheme == "mxfp4" and problem.act_format == "none"
    return CAPABILITIES[:1] if bf16 else CAPABILITIES


def _routed_function(problem: Problem) -> str | None:
    if problem.scheme not in trtllm_call.FAMILIES:
        return None
    return trtllm_call.function_name(problem.scheme, True, dynamic=problem.input_scale == "none")


def _notes(problem: Problem) -> str:
    if problem.scheme not in RULES:
        return ""
    padded = RULES[problem.scheme].padded(problem.hidden_size, problem.intermediate_size)
    said = [limits.sizes_noted(problem, *padded), limits.routing_noted(problem)]
    if problem.input_scale == "expert":
        said.append("takes the largest input scale for all experts")
    said += [*_rounded(problem), limits.release_noted()]
    return "; ".join(["by contract, not run on SM100", *(s for s in said if s)])


def _rounded(problem: Problem) -> list[str]:
    """What is rounded where the numerics contract rounds nothing."""
    said = []
    if problem.scheme == "fp8_block":
        said.append("rounds what the first GEMM gives to e4m3, in groups of 128, before the activation")
    if problem.scheme in ("nvfp4", "fp8") and problem.input_scale == "none":
        said.append("rounds the intermediate to bfloat16 before it is quantized per token")
    said.append("rounds what the second GEMM gives to bfloat16 before the sum over experts")
    if problem.router_weight_on_input:
        return said  # the routing weights that are left are ones
    always = limits.can_import(problem) and not package.entry(_routed_function(problem) or "").accepts_pairs
    return [*said, "rounds routing weights to bfloat16" + ("" if always else " where the kernel routes")]


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
            Requirement(_situ_unmet),
            Requirement(_constants_unmet),
            Requirement(_order_unmet),
            limits.has_parameter("gemm1_clamp_limit", _takes_constants, "an activation with constants"),
            # Earlier kernels ignored them, or the launcher refused them.
            limits.since("0.6.13", _constants_of("nvfp4")),
            limits.since("0.6.18", _constants_of("fp8_block")),
            limits.since("0.7.2", _newest),
            limits.one_input_scale(),
            limits.has_parameter("per_token_scale", _scales_tokens, "input_scale 'none'"),
            limits.usual_nvfp4(_scales_tokens),
            limits.weight_scales("tensor", "half", dynamic=("tensor", "half", "channel")),
            limits.no_bias(("mxint4", "mxfp8", "fp8", "fp8_block", "none")),
            limits.hidden_dtype({name: (torch.bfloat16,) for name in ("mxfp4", "mxint4", "none")}),
            limits.at_most("num_experts", MAX_EXPERTS),
            limits.at_most("top_k", MAX_TOP_K),
            limits.even_experts(FP8_BLOCK_LAUNCHER, 4),
        ),
        prepare=LAYER.prepare,
        restore=LAYER.restore,
        run=run,
        run_monolithic=run_monolithic,
        bias_layout=LAYER.biases,
        one_input_scale=True,
        notes=_notes,
        accuracy=STANDARD,
        of_the_field=True,
    )
)
