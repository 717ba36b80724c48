"""Calls of FlashInfer's TRTLLM-gen functions, routed and monolithic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_moe_ops.backends.flashinfer import package, routing, trtllm_operands
from torch_moe_ops.backends.flashinfer.hidden import (
    Hidden,
    hidden_states_of,
    is_aligned,
    is_dynamic,
    op_name,
    weigh_input,
)
from torch_moe_ops.backends.flashinfer.trtllm_layout import LAYER
from torch_moe_ops.backends.flashinfer.trtllm_operands import Prepared
from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.core.check import fail
from torch_moe_ops.core.schemes import SCHEMES

# One launch covers a y grid of 65,535 blocks, each of at least 8 rows of the permuted tokens.
MAX_EXPANDED_TOKENS = 65_535 * 8


class _Family(NamedTuple):
    stem: str  # the functions are trtllm_<stem>_moe and trtllm_<stem>_routed_moe
    prepare: Callable[[ExpertsCall, Hidden], Prepared]
    bias_in_routed: bool = True  # the routed function takes routing_bias as well
    has_biases: bool = False  # of the experts


FAMILIES = {
    "nvfp4": _Family("fp4_block_scale", trtllm_operands.nvfp4, has_biases=True),
    "mxfp4": _Family("fp4_block_scale", trtllm_operands.mxfp4, has_biases=True),
    "mxint4": _Family("mxint4_block_scale", trtllm_operands.mxint4, bias_in_routed=False),
    "fp8": _Family("fp8_per_tensor_scale", trtllm_operands.fp8),
    "fp8_block": _Family("fp8_block_scale", trtllm_operands.fp8_block),
    "mxfp8": _Family("fp8_block_scale", trtllm_operands.mxfp8),
    "none": _Family("bf16", trtllm_operands.bf16, bias_in_routed=False),
}
# fp8 weights with activations that were not calibrated.
FP8_DYNAMIC = _Family("fp8_per_channel_scale", trtllm_operands.fp8_channel)


def _family(call: ExpertsCall) -> _Family:
    return FP8_DYNAMIC if call.scheme == "fp8" and is_dynamic(call) else FAMILIES[call.scheme]


def function_name(scheme: str, routed: bool, dynamic: bool = False) -> str:
    """FlashInfer's function for a scheme. dynamic: with activations that were not calibrated."""
    family = FP8_DYNAMIC if scheme == "fp8" and dynamic else FAMILIES[scheme]
    return f"trtllm_{family.stem}_{'routed_' if routed else ''}moe"


def run_routed(call: ExpertsCall, out: Tensor) -> None:
    """Routing is given."""
    if call.scheme not in FAMILIES:
        fail(op_name(call), "backend", f"be one that runs {call.scheme} weights", call.backend)
    call = weigh_input(call)
    entry = package.entry(function_name(call.scheme, True, is_dynamic(call)))
    total, top_k = call.all_experts(), call.topk_ids.shape[1]
    if top_k > routing.MAX_TOP_K:  # older releases would leave the order of tokens uninitialized
        fail(op_name(call), "topk_ids", f"have at most {routing.MAX_TOP_K} columns for {call.backend}", top_k)
    for rows in _chunks(out.shape[0], top_k):
        arguments = routing.given_arguments(entry, call.topk_ids[rows], call.topk_weights[rows], total)
        if _family(call).bias_in_routed:
            arguments["routing_bias"] = None
        _run(entry, _rows_of(call, rows), arguments, out[rows])


def run_monolithic(call: ExpertsCall, arguments: tuple[Any, ...], out: Tensor) -> bool:
    """The kernel routes, where it can do what is asked. arguments: those of moeq::route."""
    if call.scheme not in FAMILIES:
        return False
    wanted = routing.Routing(*arguments)
    entry = package.entry(function_name(call.scheme, False, is_dynamic(call)))
    if call.router_weight_on_input or routing.kernel_unmet(call.scheme, wanted) is not None:
        return False
    for rows in _chunks(out.shape[0], wanted.top_k):
        part = wanted._replace(router_logits=wanted.router_logits[rows])
        _run(entry, _rows_of(call, rows), routing.logits_arguments(call.scheme, part), out[rows])
    return True


def _chunks(tokens: int, top_k: int) -> list[slice]:
    step = max(1, MAX_EXPANDED_TOKENS // top_k)
    return [slice(start, min(start + step, tokens)) for start in range(0, tokens, step)]


def _rows_of(call: ExpertsCall, rows: slice) -> ExpertsCall:
    scale = call.hidden_states_scale
    return call._replace(
        hidden_states=call.hidden_states[rows], hidden_states_scale=None if scale is None else scale[rows]
    )


def _run(entry: package.Entry, call: ExpertsCall, routed: dict[str, Any], out: Tensor) -> None:
    family, w2 = _family(call), call.w2
    if not family.has_biases:
        trtllm_operands.refuse_biases(call, f"its routed kernels of {call.scheme} weights take none")
    inter = LAYER.intermediate_size(SCHEMES[call.scheme], tuple(w2.shape))
    hidden = w2.shape[2] if w2.ndim == 4 else w2.shape[1]
    prepared = family.prepare(call, hidden_states_of(call, hidden))
    experts, offset = call.w13.shape[0], call.local_expert_offset
    # Kernels write bfloat16, in the padded width.
    fits = out.dtype == torch.bfloat16 and hidden == out.shape[1] and is_aligned(out)
    direct = fits and "output" in entry.parameters
    optional = prepared.optional | ({"output": out} if direct else {})
    result = entry(
        optional,
        **routed,
        **prepared.arguments,
        num_experts=call.num_experts or offset + experts,
        intermediate_size=inter,
        local_expert_offset=offset,
        local_num_experts=experts,
    )
    if not direct:
        out.copy_(result[:, : out.shape[1]])
