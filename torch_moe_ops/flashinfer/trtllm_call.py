"""Calls of FlashInfer's TRTLLM-gen functions: what each scheme passes, routed and monolithic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_moe_ops._check import fail
from torch_moe_ops.activations import ACTIVATIONS
from torch_moe_ops.flashinfer import package, routing
from torch_moe_ops.flashinfer.activations import activation_number, constant_tensors
from torch_moe_ops.flashinfer.hidden import (
    Hidden,
    calibrated,
    hidden_states_of,
    op_name,
    refuse_packed,
    single_scale,
    weigh_input,
)
from torch_moe_ops.flashinfer.trtllm_layout import LAYER
from torch_moe_ops.ops.call import ExpertsCall
from torch_moe_ops.schemes import SCHEMES

# One launch covers a y grid of 65,535 blocks, each of at least 8 rows of the permuted tokens.
MAX_EXPANDED_TOKENS = 65_535 * 8


class Prepared(NamedTuple):
    """The arguments of one call. optional: passed where the installed release knows them."""

    arguments: dict[str, Any]
    optional: dict[str, Any]


def _scalars(alpha: Tensor, gscale: Tensor, gated: bool) -> tuple[Tensor, Tensor]:
    """output1_scale_scalar and output1_scale_gate_scalar, float32 [E].

    alpha: [E], or [E, 2] for (gate, up). The first one also brings the output into the units in which the
    intermediate is quantized; where nothing is gated, the activation lies between the two and they stay apart.
    """
    gate, up = (alpha, alpha) if alpha.ndim == 1 else (alpha[:, 0], alpha[:, -1])
    scalar = up * gscale if gated else gscale.expand(alpha.shape[0])
    return scalar.contiguous(), gate.contiguous()


def _nvfp4(call: ExpertsCall, x: Hidden) -> Prepared:
    gated = ACTIVATIONS[call.activation].is_gated
    assert call.g1_alphas is not None and call.g2_alphas is not None
    scalar, gate = _scalars(call.g1_alphas, calibrated(call, "a2_gscale"), gated)
    arguments = _fp4(call, x) | constant_tensors(call, unit=gate)
    arguments |= {"output1_scale_scalar": scalar, "output1_scale_gate_scalar": gate}
    arguments["output2_scale_scalar"] = call.g2_alphas
    if call.w13_bias is not None:
        arguments["gemm1_bias"] = _bias_before_scaling(call.w13_bias, call.g1_alphas, gated)
    if call.w2_bias is not None:
        arguments["gemm2_bias"] = call.w2_bias / call.g2_alphas[:, None]
    return Prepared(arguments | _activation(call), _linear_scales())


def _bias_before_scaling(bias: Tensor, alphas: Tensor, gated: bool) -> Tensor:
    """In units of the accumulator: the kernel adds the bias first and multiplies then.

    bias: rows as the layout has them; where gated, 8 of up and 8 of gate take turns.
    """
    if not gated or alphas.ndim == 1:
        return bias / alphas.view(alphas.shape[0], 1)
    return (bias.unflatten(1, (-1, 2, 8)) / alphas.flip(1)[:, None, :, None]).flatten(1)


def _mxfp4(call: ExpertsCall, x: Hidden) -> Prepared:
    scalars: dict[str, Any] = dict.fromkeys(_SCALARS)
    return Prepared(_fp4(call, x) | scalars | constant_tensors(call) | _activation(call), _linear_scales())


_SCALARS = ("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar")


def _fp4(call: ExpertsCall, x: Hidden) -> dict[str, Any]:
    # The kernels want every block scale typed e4m3, also e8m0 bytes.
    e4m3 = torch.float8_e4m3fn
    assert call.w13_scale is not None and call.w2_scale is not None
    return {
        "hidden_states": x.values,
        "hidden_states_scale": None if x.scale is None else x.scale.view(e4m3),
        "gemm1_weights": call.w13,
        "gemm1_weights_scale": call.w13_scale.view(e4m3),
        "gemm1_bias": call.w13_bias,
        "gemm2_weights": call.w2,
        "gemm2_weights_scale": call.w2_scale.view(e4m3),
        "gemm2_bias": call.w2_bias,
    }


def _linear_scales() -> dict[str, Any]:
    if not package.has_member("SfLayout", "layout_linear"):
        return {}
    return {"hidden_states_scale_layout": package.enum("SfLayout").layout_linear}


def _activation(call: ExpertsCall) -> dict[str, Any]:
    return {"activation_type": activation_number(call.activation)}


def _mxint4(call: ExpertsCall, x: Hidden) -> Prepared:
    arguments = {
        "hidden_states": x.values,
        "gemm1_weights": call.w13.view(torch.uint8),
        "gemm1_weights_scale": call.w13_scale,
        "gemm2_weights": call.w2.view(torch.uint8),
        "gemm2_weights_scale": call.w2_scale,
    }
    return Prepared(arguments | constant_tensors(call), {})


def _fp8(call: ExpertsCall, x: Hidden) -> Prepared:
    """Per tensor. The scales of weights (of each half) and activations make the three scalars."""
    assert call.w13_scale is not None and call.w2_scale is not None
    refuse_packed(call, "whose scale must be that of the layer")
    input_gscale, gscale = single_scale(call, "a1_gscale"), calibrated(call, "a2_gscale")
    scalar, gate = _scalars(call.w13_scale / input_gscale, gscale, ACTIVATIONS[call.activation].is_gated)
    arguments = {
        "hidden_states": x.values,
        "gemm1_weights": call.w13,
        "output1_scales_scalar": scalar,
        "output1_scales_gate_scalar": gate,
        "gemm2_weights": call.w2,
        "output2_scales_scalar": call.w2_scale[:, 0] / gscale,
        "use_routing_scales_on_input": False,
    }
    return Prepared(arguments | _activation(call), {})


def _fp8_block(call: ExpertsCall, x: Hidden) -> Prepared:
    assert x.scale is not None
    arguments = {
        "hidden_states": x.values,
        "hidden_states_scale": x.scale.T.contiguous(),
        "gemm1_weights": call.w13,
        "gemm1_weights_scale": call.w13_scale,
        "gemm2_weights": call.w2,
        "gemm2_weights_scale": call.w2_scale,
        "use_shuffled_weight": True,
        "weight_layout": package.number("WeightLayout", "BlockMajorK"),
        "fp8_quantization_type": package.enum("Fp8QuantizationType").DeepSeekFp8,
    }
    return Prepared(arguments, _activation(call))


def _bf16(call: ExpertsCall, x: Hidden) -> Prepared:
    arguments = {
        "hidden_states": x.values,
        "gemm1_weights": call.w13,
        "gemm2_weights": call.w2,
        "use_shuffled_weight": True,
        "weight_layout": package.number("WeightLayout", "BlockMajorK"),
    }
    # Releases before these arguments have the plain activation, for which there is nothing to pass.
    constants = {name: value for name, value in constant_tensors(call).items() if value is not None}
    return Prepared(arguments | _activation(call) | constants, {})


class _Family(NamedTuple):
    stem: str  # the functions are trtllm_<stem>_moe and trtllm_<stem>_routed_moe
    prepare: Callable[[ExpertsCall, Hidden], Prepared]
    bias_in_routed: bool = True  # the routed function takes routing_bias as well


FAMILIES = {
    "nvfp4": _Family("fp4_block_scale", _nvfp4),
    "mxfp4": _Family("fp4_block_scale", _mxfp4),
    "mxint4": _Family("mxint4_block_scale", _mxint4, bias_in_routed=False),
    "fp8": _Family("fp8_per_tensor_scale", _fp8),
    "fp8_block": _Family("fp8_block_scale", _fp8_block),
    "none": _Family("bf16", _bf16, bias_in_routed=False),
}


def function_name(scheme: str, routed: bool) -> str:
    """FlashInfer's function for a scheme."""
    return f"trtllm_{FAMILIES[scheme].stem}_{'routed_' if routed else ''}moe"


def run_routed(call: ExpertsCall, out: Tensor) -> None:
    """Routing is given."""
    if call.scheme not in FAMILIES:
        fail(op_name(call), "backend", f"be one that runs {call.scheme} weights", call.backend)
    call = weigh_input(call)
    entry = package.entry(function_name(call.scheme, routed=True))
    total = call.num_experts or call.local_expert_offset + call.w13.shape[0]
    for rows in _chunks(out.shape[0], call.topk_ids.shape[1]):
        arguments = routing.given_arguments(entry, call.topk_ids[rows], call.topk_weights[rows], total)
        if FAMILIES[call.scheme].bias_in_routed:
            arguments["routing_bias"] = None
        _run(entry, _rows_of(call, rows), arguments, out[rows])


def run_monolithic(call: ExpertsCall, arguments: tuple[Any, ...], out: Tensor) -> bool:
    """The kernel routes, where it can do what is asked. arguments: those of moeq::route."""
    if call.scheme not in FAMILIES:
        return False
    wanted = routing.Routing(*arguments)
    entry = package.entry(function_name(call.scheme, routed=False))
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
    family, w2 = FAMILIES[call.scheme], call.w2
    inter = LAYER.intermediate_size(SCHEMES[call.scheme], tuple(w2.shape))
    hidden = w2.shape[2] if w2.ndim == 4 else w2.shape[1]
    prepared = family.prepare(call, hidden_states_of(call, hidden))
    experts, offset = call.w13.shape[0], call.local_expert_offset
    # Kernels write bfloat16, in the padded width.
    direct = out.dtype == torch.bfloat16 and hidden == out.shape[1] and "output" in entry.parameters
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
