"""Calls of FlashInfer's cutlass_fused_moe: what each scheme passes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_moe_ops.backends.flashinfer import package
from torch_moe_ops.backends.flashinfer.activations import activation_name, activation_number
from torch_moe_ops.backends.flashinfer.cutlass_layout import LAYER
from torch_moe_ops.backends.flashinfer.hidden import (
    Hidden,
    calibrated,
    hidden_states_of,
    is_aligned,
    op_name,
    refuse_packed,
    single_scale,
    weigh_input,
)
from torch_moe_ops.backends.flashinfer.workspace import Sizes, workspace
from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.core.check import fail
from torch_moe_ops.core.schemes import SCHEMES

FUNCTION = "cutlass_fused_moe"
FLOATS = (torch.bfloat16, torch.float16)
MAX_EXPANDED_TOKENS = 1 << 20  # bounds the workspace, which grows with tokens * top_k


class Operands(NamedTuple):
    """What depends on the scheme. flags: those of FlashInfer that are set."""

    hidden: Tensor
    hidden_scale: Tensor | None
    w13: Tensor
    w2: Tensor
    quant_scales: list[Tensor]
    flags: tuple[str, ...] = ()


def _none(call: ExpertsCall, x: Hidden) -> Operands:
    return Operands(x.values, None, call.w13, call.w2, [])


def _fp8(call: ExpertsCall, x: Hidden) -> Operands:
    assert call.w13_scale is not None and call.w2_scale is not None
    refuse_packed(call, "whose scale must be that of the layer")
    gscale = calibrated(call, "a2_gscale")
    if call.w13_scale.shape[1] != 1:
        fail(op_name(call), "w13_scale", "have shape [experts, 1]: one scale for gate and up", call.w13_scale.shape)
    dequantize_input = single_scale(call, "a1_gscale").reciprocal()
    scales = [
        call.w13_scale[:, 0] * dequantize_input,
        gscale,
        call.w2_scale[:, 0] / gscale,
        dequantize_input,
    ]
    return Operands(x.values, None, call.w13, call.w2, scales)


def _fp8_block(call: ExpertsCall, x: Hidden) -> Operands:
    """Hidden states go in unquantized; the kernel quantizes them in groups of 128."""
    assert call.w13_scale is not None and call.w2_scale is not None
    scales = [call.w13_scale, call.w2_scale]
    return Operands(x.values, None, call.w13, call.w2, scales, ("use_deepseek_fp8_block_scale",))


def _nvfp4(call: ExpertsCall, x: Hidden) -> Operands:
    assert call.w13_scale is not None and call.w2_scale is not None and x.scale is not None
    assert call.g1_alphas is not None and call.g2_alphas is not None
    if call.g1_alphas.ndim != 1:
        fail(op_name(call), "g1_alphas", "have shape [experts]: one alpha for gate and up", call.g1_alphas.shape)
    scales = [
        single_scale(call, "a1_gscale"),
        call.w13_scale.view(torch.int32),
        call.g1_alphas,
        calibrated(call, "a2_gscale"),
        call.w2_scale.view(torch.int32),
        call.g2_alphas,
    ]
    return Operands(x.values, _tiled(x.scale), call.w13.view(torch.int64), call.w2.view(torch.int64), scales)


def _mx(call: ExpertsCall, x: Hidden) -> Operands:
    """mxfp4 or mxfp8 weights."""
    assert call.w13_scale is not None and call.w2_scale is not None and x.scale is not None
    ones = torch.ones(call.w13.shape[0], dtype=torch.float32, device=call.w13.device)
    scales = [call.w13_scale.view(torch.int32), ones, call.w2_scale.view(torch.int32), ones]
    packed = call.w13.dtype == torch.uint8
    w13, w2 = (w.view(torch.int64) if packed else w for w in (call.w13, call.w2))
    return Operands(x.values, _tiled(x.scale), w13, w2, scales, ("use_mxfp8_act_scaling",))


def _tiled(scale: Tensor) -> Tensor:
    """Linear scales of activations into 128x4 tiles: [padded tokens, padded columns]."""
    rows = -(-scale.shape[0] // 128) * 128
    return torch.ops.moeq.swizzle_scale(scale).view(rows, -1)


FAMILIES: dict[str, Callable[[ExpertsCall, Hidden], Operands]] = {
    "none": _none,
    "fp8": _fp8,
    "fp8_block": _fp8_block,
    "nvfp4": _nvfp4,
    "mxfp4": _mx,
    "mxfp8": _mx,
}


def _hidden(call: ExpertsCall, hidden_size: int) -> Hidden:
    if call.scheme != "fp8_block":
        return hidden_states_of(call, hidden_size, FLOATS)
    refuse_packed(call, "which quantizes them itself")
    return hidden_states_of(call._replace(act_format="none"), hidden_size)


def _activation(call: ExpertsCall) -> dict[str, Any]:
    """Type and constants, in real units: the kernel activates what it has multiplied already.

    silu's constants come together or not at all; any of them selects the kernel that has all three.
    """
    found: dict[str, Any] = {"activation_type": package.enum("ActivationType")(activation_number(call.activation))}
    alpha, beta, limit = call.swiglu_alpha, call.swiglu_beta, call.swiglu_limit
    values: dict[str, float] = {}
    if call.activation == "situ":
        values = {"situ_beta": alpha, "situ_linear_beta": beta}
    elif call.activation == "swiglustep":
        values = {"swiglu_limit": limit}
    elif activation_name(call.activation) == "Swiglu" and (alpha, beta, limit) != (1.0, 0.0, math.inf):
        values = {"swiglu_alpha": alpha, "swiglu_beta": beta, "swiglu_limit": limit}
    experts, device = call.w13.shape[0], call.w13.device
    for name, value in values.items():
        finite = min(value, torch.finfo(torch.float32).max)
        found[name] = torch.full((experts,), finite, dtype=torch.float32, device=device)
    return found


def _biases(call: ExpertsCall, dtype: torch.dtype) -> dict[str, Any]:
    """In the output dtype and with the rows of the weights; the kernel takes both or none."""
    if call.w13_bias is None and call.w2_bias is None:
        return {}
    pairs = (("fc1_expert_biases", call.w13_bias, call.w13), ("fc2_expert_biases", call.w2_bias, call.w2))
    return {name: _bias(bias, weight, dtype) for name, bias, weight in pairs}


def _bias(bias: Tensor | None, weight: Tensor, dtype: torch.dtype) -> Tensor:
    if bias is None:
        return torch.zeros(weight.shape[:2], dtype=dtype, device=weight.device)
    return torch.nn.functional.pad(bias, (0, weight.shape[1] - bias.shape[1])).to(dtype)


def run(call: ExpertsCall, out: Tensor) -> None:
    """Fill `out`, a bounded number of tokens at a time."""
    if call.scheme not in FAMILIES:
        fail(op_name(call), "backend", f"be one that runs {call.scheme} weights", call.backend)
    call = weigh_input(call)
    step = max(1, MAX_EXPANDED_TOKENS // call.topk_ids.shape[1])
    for start in range(0, out.shape[0], step):
        rows = slice(start, min(start + step, out.shape[0]))
        scale = call.hidden_states_scale
        part = call._replace(
            hidden_states=call.hidden_states[rows],
            hidden_states_scale=None if scale is None else scale[rows],
            topk_ids=call.topk_ids[rows],
            topk_weights=call.topk_weights[rows],
        )
        _run(part, out[rows])


def _run(call: ExpertsCall, out: Tensor) -> None:
    hidden_size = call.w2.shape[1]
    inter = LAYER.intermediate_size(SCHEMES[call.scheme], tuple(call.w2.shape))
    ranks, total = _expert_parallel(call)
    operands = FAMILIES[call.scheme](call, _hidden(call, hidden_size))
    unquantized = call.hidden_states.dtype if call.hidden_states_scale is None else out.dtype
    dtype = unquantized if unquantized in FLOATS else torch.bfloat16
    fits = out.dtype == dtype and out.shape[1] == hidden_size and is_aligned(out)
    target = out if fits else out.new_empty((out.shape[0], hidden_size), dtype=dtype)
    flags = dict.fromkeys(operands.flags, True)
    activation = _activation(call)
    sizes = Sizes(out.shape[0], hidden_size, inter, total, call.topk_ids.shape[1])
    dtypes = operands.hidden.dtype, operands.w13.dtype, dtype
    buffer = workspace(sizes, dtypes, activation["activation_type"], ranks, flags, out.device)
    package.entry(FUNCTION)(
        # Atomic additions in the last step would make results differ from run to run.
        {"use_fused_finalize": False, "workspace_buffer": buffer, **package.USUAL_NVFP4},
        input=operands.hidden,
        token_selected_experts=_known_ids(call.topk_ids, total),
        token_final_scales=call.topk_weights,
        fc1_expert_weights=operands.w13,
        fc2_expert_weights=operands.w2,
        output_dtype=dtype,
        quant_scales=operands.quant_scales,
        input_sf=operands.hidden_scale,
        ep_size=ranks[0],
        ep_rank=ranks[1],
        output=target,
        **activation,
        **_biases(call, dtype),
        **flags,
    )
    if target is not out:
        out.copy_(target[:, : out.shape[1]])


def _known_ids(ids: Tensor, total: int) -> Tensor:
    """Ids outside [0, total) become total, which no rank owns."""
    return ids.masked_fill((ids < 0) | (ids >= total), total)


def _expert_parallel(call: ExpertsCall) -> tuple[tuple[int, int], int]:
    """(ep_size, ep_rank) and the global number of experts. Ranks own equal, consecutive ranges."""
    experts, offset = call.w13.shape[0], call.local_expert_offset
    total = call.num_experts or offset + experts
    if total % experts or offset % experts:
        text = f"be a multiple of the {experts} local experts, as must num_experts = {total}"
        fail(op_name(call), "local_expert_offset", text, offset)
    return (total // experts, offset // experts), total
