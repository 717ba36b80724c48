"""What FlashInfer's TRTLLM-gen functions are given besides sizes and routing: one function per scheme."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_moe_ops.backends.flashinfer import package
from torch_moe_ops.backends.flashinfer.activations import Units, activation_number, constant_tensors
from torch_moe_ops.backends.flashinfer.hidden import (
    Hidden,
    calibrated,
    is_dynamic,
    op_name,
    refuse_packed,
    single_scale,
)
from torch_moe_ops.core.activations import ACTIVATIONS
from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.core.check import fail

UNKNOWN_ORDER = "no source says whether nvfp4 kernels apply the scale of a token before or after"


class Prepared(NamedTuple):
    """The arguments of one call. optional: passed where the installed release knows them."""

    arguments: dict[str, Any]
    optional: dict[str, Any]


def _units(alpha: Tensor) -> Units:
    """alpha: [E], or [E, 2] for (gate, up), or [E, 1]."""
    return Units(alpha, alpha) if alpha.ndim == 1 else Units(alpha[:, 0], alpha[:, -1])


def _scalars(alpha: Tensor, gscale: Tensor | None, gated: bool) -> tuple[Tensor, Tensor]:
    """output1_scale_scalar and output1_scale_gate_scalar, float32 [E].

    The first one also brings the output into the units in which the intermediate is quantized (None: the kernel
    finds them itself); where nothing is gated, the activation lies between the two and they stay apart.
    """
    units = _units(alpha)
    scalar = units.up if gated else torch.ones_like(units.up)
    scalar = scalar if gscale is None else scalar * gscale
    return scalar.contiguous(), units.gate.contiguous()


def _activation(call: ExpertsCall) -> dict[str, Any]:
    return {"activation_type": activation_number(call.activation)}


_NEUTRAL = {"swiglu_alpha": 1.0, "swiglu_beta": 0.0, "swiglu_limit": math.inf}


def _refuse_constants(call: ExpertsCall, why: str, names: tuple[str, ...] = tuple(_NEUTRAL)) -> None:
    """For kernels that cannot be told these."""
    for name in names:
        if getattr(call, name) != _NEUTRAL[name]:
            fail(op_name(call), name, f"be {_NEUTRAL[name]} for backend {call.backend}: {why}", getattr(call, name))


def refuse_biases(call: ExpertsCall, why: str) -> None:
    """For kernels that take none."""
    for name in ("w13_bias", "w2_bias"):
        if getattr(call, name) is not None:
            fail(op_name(call), name, f"be None for backend {call.backend}: {why}", getattr(call, name).shape)


def _given(tensors: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """Without what is absent: releases that do not know an argument have the plain activation."""
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def nvfp4(call: ExpertsCall, x: Hidden) -> Prepared:
    gated = ACTIVATIONS[call.activation].is_gated
    assert call.g1_alphas is not None and call.g2_alphas is not None
    gscale = None if is_dynamic(call) else calibrated(call, "a2_gscale")
    scalar, gate = _scalars(call.g1_alphas, gscale, gated)
    arguments = _fp4(call, x) | constant_tensors(call, _units(call.g1_alphas))
    arguments |= {"output1_scale_scalar": scalar, "output1_scale_gate_scalar": gate}
    arguments["output2_scale_scalar"] = call.g2_alphas
    if x.token_scale is not None:
        refuse_biases(call, f"{UNKNOWN_ORDER} biases")
        _refuse_constants(call, f"{UNKNOWN_ORDER} it", ("swiglu_beta", "swiglu_limit"))
        arguments["per_token_scale"] = x.token_scale
    if call.w13_bias is not None:
        arguments["gemm1_bias"] = _bias_before_scaling(call.w13_bias, call.g1_alphas, gated)
    if call.w2_bias is not None:
        arguments["gemm2_bias"] = call.w2_bias / call.g2_alphas[:, None]
    return Prepared(arguments | _activation(call), _linear_scales() | package.USUAL_NVFP4)


def _bias_before_scaling(bias: Tensor, alphas: Tensor, gated: bool) -> Tensor:
    """In units of the accumulator: the kernel adds the bias first and multiplies then.

    bias: rows as the layout has them; where gated, 8 of up and 8 of gate take turns.
    """
    if not gated or alphas.ndim == 1:
        return bias / alphas.view(alphas.shape[0], 1)
    return (bias.unflatten(1, (-1, 2, 8)) / alphas.flip(1)[:, None, :, None]).flatten(1)


def mxfp4(call: ExpertsCall, x: Hidden) -> Prepared:
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


def mxint4(call: ExpertsCall, x: Hidden) -> Prepared:
    arguments = {
        "hidden_states": x.values,
        "gemm1_weights": call.w13.view(torch.uint8),
        "gemm1_weights_scale": call.w13_scale,
        "gemm2_weights": call.w2.view(torch.uint8),
        "gemm2_weights_scale": call.w2_scale,
    }
    return Prepared(arguments | constant_tensors(call), {})


def fp8(call: ExpertsCall, x: Hidden) -> Prepared:
    """Per tensor. The scales of weights (of each half) and activations make the three scalars."""
    assert call.w13_scale is not None and call.w2_scale is not None
    refuse_packed(call, "whose scale must be that of the layer")
    if call.w13_scale.ndim != 2:
        text = "have shape [experts, 1 or 2] where activations have calibrated scales"
        fail(op_name(call), "w13_scale", text, call.w13_scale.shape)
    input_gscale, gscale = single_scale(call, "a1_gscale"), calibrated(call, "a2_gscale")
    alphas = call.w13_scale / input_gscale
    scalar, gate = _scalars(alphas, gscale, ACTIVATIONS[call.activation].is_gated)
    arguments = {
        "hidden_states": x.values,
        "gemm1_weights": call.w13,
        "output1_scales_scalar": scalar,
        "output1_scales_gate_scalar": gate,
        "gemm2_weights": call.w2,
        "output2_scales_scalar": call.w2_scale[:, 0] / gscale,
        "use_routing_scales_on_input": False,
    }
    return Prepared(arguments | _activation(call) | _given(constant_tensors(call, _units(alphas))), {})


def fp8_channel(call: ExpertsCall, x: Hidden) -> Prepared:
    """Per token and per row of the weights; scales of whole matrices or halves are repeated for their rows."""
    assert call.w13_scale is not None and call.w2_scale is not None and x.scale is not None
    _refuse_constants(call, "fp8 kernels with a scale per token take no constants")
    ones = torch.ones(call.w13.shape[0], dtype=torch.float32, device=call.w13.device)
    arguments = {
        "hidden_states": x.values,
        "hidden_states_scale": x.scale,
        "gemm1_weights": call.w13,
        "gemm1_per_channel_weight_scale": _per_row(call.w13_scale, call.w13),
        "output1_scale_scalar": ones,
        "output1_scale_gate_scalar": ones,
        "gemm2_weights": call.w2,
        "gemm2_per_channel_weight_scale": _per_row(call.w2_scale, call.w2),
        "output2_scale_scalar": ones,
        "use_routing_scales_on_input": False,
    }
    return Prepared(arguments | _activation(call), {})


def _per_row(scale: Tensor, weight: Tensor) -> Tensor:
    """[E, rows] in the order of the layout's rows, from [E, rows, 1], [E, 1], or [E, 2] for (gate, up).

    Of two halves, 8 rows of up and 8 of gate take turns.
    """
    experts, rows = weight.shape[:2]
    if scale.ndim == 3:
        return scale.view(experts, rows)
    parts = scale.flip(1)[:, None, :, None].expand(experts, rows // (8 * scale.shape[1]), scale.shape[1], 8)
    return parts.reshape(experts, rows).contiguous()


def fp8_block(call: ExpertsCall, x: Hidden) -> Prepared:
    assert x.scale is not None
    return _fp8_blocks(call, x.values, x.scale.T.contiguous(), "BlockMajorK", "DeepSeekFp8")


def mxfp8(call: ExpertsCall, x: Hidden) -> Prepared:
    assert x.scale is not None
    return _fp8_blocks(call, x.values, x.scale, "MajorK", "MxFp8")


def _fp8_blocks(call: ExpertsCall, values: Tensor, scale: Tensor, layout: str, kind: str) -> Prepared:
    """e4m3 operands with scales of blocks on both sides. layout, kind: members of FlashInfer's enumerations."""
    arguments = {
        "hidden_states": values,
        "hidden_states_scale": scale,
        "gemm1_weights": call.w13,
        "gemm1_weights_scale": call.w13_scale,
        "gemm2_weights": call.w2,
        "gemm2_weights_scale": call.w2_scale,
        "use_shuffled_weight": True,
        "weight_layout": package.number("WeightLayout", layout),
        "fp8_quantization_type": getattr(package.enum("Fp8QuantizationType"), kind),
    }
    return Prepared(arguments | _given(constant_tensors(call)), _activation(call))


def bf16(call: ExpertsCall, x: Hidden) -> Prepared:
    arguments = {
        "hidden_states": x.values,
        "gemm1_weights": call.w13,
        "gemm2_weights": call.w2,
        "use_shuffled_weight": True,
        "weight_layout": package.number("WeightLayout", "BlockMajorK"),
    }
    return Prepared(arguments | _activation(call) | _given(constant_tensors(call)), {})
