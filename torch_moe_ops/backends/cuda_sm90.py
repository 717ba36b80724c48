"""The backends `cuda_sm90` and `cuda_sm90_int4`: CUDA kernels for Hopper GPUs, in csrc/cuda/sm90 (docs/hopper.md).

The second one rounds its weights, so that it has to be asked for. Both lay them out in the same way, and two kernels
read that: `decode`, one persistent launch for few tokens, and `prefill`, grouped GEMMs for many. Shapes alone decide.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.backends._sm90_common import NEEDS, NO_ROUTER, Router, plain_arguments, router_of, tensor_arguments
from torch_moe_ops.backends._sm90_formats import prepare, restore, scales_reason, specs
from torch_moe_ops.backends._sm90_layout import TILE
from torch_moe_ops.backends.registry import Backend, Layout, Problem, Requirement, formats, one_of, register
from torch_moe_ops.ops.call import ExpertsCall
from torch_moe_ops.quant import nvfp4

FORMATS: dict[str, tuple[str, ...]] = {"nvfp4": ("nvfp4", "none"), "mxfp4": ("none",)}
# Their weights are rounded to bfloat16, which is more than docs/numerics.md allows a backend that nobody asked for.
ROUNDED_FORMATS: dict[str, tuple[str, ...]] = {"mxint4": ("none",), "int4": ("none",)}
DECODE_MAX_SLOTS = 2048  # tokens * top_k that the decode kernel takes (csrc/cuda/sm90/decode_plan.h)


def decode_max_tokens(num_experts: int, top_k: int) -> int:
    """Up to this many tokens the decode kernel runs, beyond it the prefill kernels; num_experts are the local ones."""
    return min(max(8, 8 * num_experts // top_k), DECODE_MAX_SLOTS // top_k)


def run(call: ExpertsCall, out: Tensor) -> None:
    """Fill `out` [num_tokens, hidden_size] (bfloat16, float16 or float32, contiguous) from a checked call."""
    tokens, top_k = call.topk_ids.shape
    run_kernel(call, out, decode=tokens <= decode_max_tokens(call.w13.shape[0], top_k))


def run_monolithic(call: ExpertsCall, routing: tuple[Any, ...], out: Tensor) -> bool:
    """`run` from router logits; False where their groups are more than the kernels route."""
    router = router_of(routing)
    if router is None:
        return False
    decode = out.shape[0] <= decode_max_tokens(call.w13.shape[0], router.top_k)
    run_kernel(call._replace(topk_ids=None, topk_weights=None), out, decode, router)  # type: ignore[arg-type]
    return True


def run_kernel(call: ExpertsCall, out: Tensor, decode: bool, router: Router = NO_ROUTER) -> None:
    """`run` on the kernel that the caller names; with a router, call.topk_ids and topk_weights are None."""
    x, quantize = call.hidden_states, call.act_format == "nvfp4"
    packed = call.hidden_states_scale is not None
    if call.hidden_states_scale is not None:
        # Code times block scale has six significant bits: bfloat16 holds it, and the alphas have the rest.
        x = nvfp4.dequantize(x, call.hidden_states_scale).to(torch.bfloat16)
    torch.ops.moeq_C.experts_sm90(
        out,
        x,
        *tensor_arguments(call),
        quantize and not packed,
        quantize,
        *plain_arguments(call),
        decode,
        *router,
    )


def _hidden_size_reason(problem: Problem) -> str | None:
    if problem.hidden_size % TILE == 0:
        return None
    return f"hidden_size must be a multiple of {TILE}, got {problem.hidden_size}"


def _notes(problem: Problem) -> str:
    """Which kernel a number of tokens would get, and where another backend may be faster."""
    slower = "triton may be faster at 6 to 24 tokens an expert (docs/hopper.md)"
    if problem.top_k is None:
        most = decode_max_tokens(problem.num_local_experts, 1)
        return f"decode kernel up to about {most} / top_k tokens, prefill kernels beyond; {slower}"
    most = decode_max_tokens(problem.num_local_experts, problem.top_k)
    return f"decode kernel up to {most} tokens, prefill kernels beyond; {slower}"


def _register(name: str, schemes: dict[str, tuple[str, ...]], auto: bool) -> Backend:
    return register(
        Backend(
            name=name,
            layout=Layout("cuda_sm90_tiles_v1", specs, lambda scheme, w2_shape: w2_shape[2] * TILE),
            requires=(
                *NEEDS,
                formats(schemes),
                one_of("weight_policy", "exact"),
                Requirement(_hidden_size_reason),
                Requirement(scales_reason),
            ),
            prepare=prepare,
            restore=restore,
            run=run,
            run_monolithic=run_monolithic,
            hidden_dtypes=(torch.bfloat16,),
            notes=_notes,
            auto=auto,
        )
    )


_register("cuda_sm90", FORMATS, auto=True)
_register("cuda_sm90_int4", ROUNDED_FORMATS, auto=False)
