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
DECODE_TOKENS = 14
LARGE_MATRIX = 12_000_000
DECODE_MAX_SLOTS = 2048  # tokens * top_k that the decode kernel takes (csrc/cuda/sm90/decode_plan.h)
FEW_TOKENS, FEW_SLOTS = 8, 128  # that it takes without grid barriers (decode_few.h)
# Shapes of the prefill kernel: up to so many tokens an expert, the first one if there is so much work (prefill.cu).
SLIM, NARROW, SLIM_BLOCKS = 24, 80, 800


def decode_max_tokens(num_experts: int, top_k: int, matrix: int) -> int:
    """Up to this many tokens the decode kernel runs, beyond it the prefill kernels (docs/hopper.md, section 5).

    num_experts: local ones. matrix: values of an expert's w2.
    """
    most = DECODE_TOKENS
    if matrix >= LARGE_MATRIX:
        most = max(most, 7 * num_experts // (4 * top_k))
    return min(most, DECODE_MAX_SLOTS // top_k)


def run(call: ExpertsCall, out: Tensor) -> None:
    """Fill `out` [num_tokens, hidden_size] (bfloat16, float16 or float32, contiguous) from a checked call."""
    run_kernel(call, out, _decodes(call, out, call.topk_ids.shape[1]))


def run_monolithic(call: ExpertsCall, routing: tuple[Any, ...], out: Tensor) -> bool:
    """`run` from router logits; False where their groups are more than the kernels route."""
    router = router_of(routing)
    if router is None:
        return False
    without_ids = call._replace(topk_ids=None, topk_weights=None)  # type: ignore[arg-type]
    run_kernel(without_ids, out, _decodes(call, out, router.top_k), router)
    return True


def _decodes(call: ExpertsCall, out: Tensor, top_k: int) -> bool:
    tokens, hidden = out.shape
    return tokens <= decode_max_tokens(call.w13.shape[0], top_k, hidden * call.w2.shape[2] * TILE)


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
    """Which kernel, and which of its shapes, a number of tokens would get (docs/hopper.md, sections 3 to 5)."""
    experts, matrix = problem.num_local_experts, problem.hidden_size * problem.intermediate_size
    if problem.top_k is None:
        least, most = (decode_max_tokens(experts, k, matrix) for k in (32, 1))
        switch = f"{least}" if least == most else f"{least} to {most} (by top_k)"
        return f"decode kernel up to {switch} tokens, prefill kernels beyond"
    top_k = problem.top_k
    most = decode_max_tokens(experts, top_k, matrix)
    few = min(FEW_TOKENS, FEW_SLOTS // top_k, most)
    shapes = {"slim": SLIM * experts // top_k, "narrow": NARROW * experts // top_k}
    if experts * -(-problem.hidden_size // 256) < SLIM_BLOCKS:
        del shapes["slim"]
    tiles = "".join(f"{shape} tiles up to {tokens}, " for shape, tokens in shapes.items() if tokens > most)
    decode = f"decode kernel up to {most} tokens (without grid barriers up to {few}, while its buffers fit an SM)"
    return f"{decode}, prefill kernels: {tiles}wide beyond"


def _notes_of_rounded(problem: Problem) -> str:
    return f"weights are rounded to bfloat16; {_notes(problem)}"


def _register(name: str, schemes: dict[str, tuple[str, ...]], auto: bool) -> Backend:
    return register(
        Backend(
            name=name,
            layout=Layout(
                "cuda_sm90_tiles_v1",
                specs,
                lambda scheme, w2_shape: w2_shape[2] * TILE,
                stored=dict.fromkeys(ROUNDED_FORMATS, torch.uint8),
            ),
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
            notes=_notes if auto else _notes_of_rounded,
            auto=auto,
        )
    )


_register("cuda_sm90", FORMATS, auto=True)
_register("cuda_sm90_int4", ROUNDED_FORMATS, auto=False)
