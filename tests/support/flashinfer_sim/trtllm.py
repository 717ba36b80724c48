"""The TRTLLM-gen functions: bind, check, decode the layouts, compute."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import cpp, launcher, layouts, numbers, routing
from . import experts as experts_
from .experts import Expert, Roundings, layer


def simulate(op: str, values: tuple[Any, ...]) -> list[Tensor]:
    """One call of a function of the compiled module, in its positional order."""
    names = cpp.parameters(op)
    assert len(names) == len(values), f"{op} takes {len(names)} arguments, got {len(values)}"
    a = dict(zip(names, values, strict=True))
    launcher.common(a)
    result = _OPS[op](a)
    assert result.shape == a["output"].shape
    a["output"].copy_(result)
    return []


def _optional(a: dict[str, Any], name: str, e: int, otherwise: float) -> float:
    return otherwise if a.get(name) is None else a[name][e].item()


def _constants(a: dict[str, Any], e: int, gate_factor: float = 1.0, name: str = "Swiglu") -> dict[str, float]:
    """Where no limit is given, SwigluStep has one of its own, in real units."""
    return {
        "alpha": _optional(a, "gemm1_alpha", e, 1.0),
        "beta": _optional(a, "gemm1_beta", e, 0.0),
        "limit": _optional(a, "gemm1_clamp_limit", e, 7.0 / gate_factor if name == "SwigluStep" else math.inf),
    }


def _written(intermediate: Tensor) -> Tensor:
    """As the first GEMM writes it where another kernel quantizes it row by row."""
    return numbers.round_bf16(intermediate) if experts_.ROUNDS else intermediate


def _fused_rows(matrix: Tensor, gated: bool) -> Tensor:
    """Shuffled by 32 for tiles of 128 rows; up and gate alternate."""
    rows = layouts.unshuffled(matrix, 32)
    return layouts.separated(rows) if gated else rows


def _fp4(a: dict[str, Any]) -> Tensor:
    name = launcher.activation(a, ("Swiglu", "SwigluStep", "Geglu", "Relu2", "Identity"))
    act_vec, weight_vec = launcher.fp4(a, name)
    gated = launcher.halves(name) == 2
    decode = numbers.e4m3 if weight_vec == 16 else numbers.e8m0
    experts = []
    for e in range(a["local_num_experts"]):
        parts = []
        for which, apart in (("gemm1", gated), ("gemm2", False)):
            codes = numbers.e2m1(a[f"{which}_weights"][e])
            stored = a[f"{which}_weights_scale"][e].view(torch.uint8)
            scale = layouts.untiled(stored.reshape(codes.shape[0], codes.shape[1] // weight_vec))
            bias = a[f"{which}_bias"]
            bias = None if bias is None else _fused_rows(bias[e].double(), apart)
            parts += [_fused_rows(numbers.blocks(codes, decode(scale)), apart), bias]
        w1, bias1, w2, bias2 = parts
        factors = {
            "up_factor": _optional(a, "output1_scales_scalar", e, 1.0),
            "gate_factor": _optional(a, "output1_scales_gate_scalar", e, 1.0),
            "factor2": _optional(a, "output2_scales_scalar", e, 1.0),
        }
        constants = _constants(a, e, factors["gate_factor"], name)
        experts.append(Expert(w1, w2, bias1=bias1, bias2=bias2, **factors, **constants))
    x = a["hidden_states"]
    requantize: Callable[[int, Tensor], Tensor]
    if act_vec == 16:
        hidden = numbers.blocks(numbers.e2m1(x), numbers.e4m3(a["hidden_states_scale"]))
        one = torch.tensor(1.0)  # what comes out of the first GEMM is in the right units already
        requantize = lambda e, h: numbers.through_nvfp4(h, one)  # noqa: E731
        if a.get("per_token_scales") is not None:
            launcher.usual_nvfp4(a)
            hidden = hidden * a["per_token_scales"].double()[:, None]
            requantize = lambda e, h: numbers.through_nvfp4_rows(_written(h))  # noqa: E731
    elif act_vec == 32:
        hidden = numbers.blocks(numbers.e4m3(x), numbers.e8m0(a["hidden_states_scale"]))
        requantize = lambda e, h: numbers.through_mxfp8(h)  # noqa: E731
    else:
        hidden = x.double()
        requantize = lambda e, h: numbers.round_bf16(h)  # noqa: E731
    return _layer(a, hidden, experts, name, requantize, "topk_ids", "topk_weights")


def _layer(
    a: dict[str, Any],
    hidden: Tensor,
    experts: list[Expert],
    name: str,
    requantize: Callable[[int, Tensor], Tensor],
    ids_name: str = "expert_indices",
    weights_name: str = "expert_weights",
    roundings: Roundings = Roundings(second=numbers.round_bf16),  # noqa: B008 (it is frozen)
) -> Tensor:
    ids, weights = routing.decode(a, _first(a, ids_name, "expert_indices"), weights_name)
    return layer(lambda e: hidden, experts, ids, weights, a["local_expert_offset"], name, requantize, roundings)


def _first(a: dict[str, Any], *names: str) -> str:
    return next((n for n in names if n in a), names[0])


def _blocked_rows(stored: Tensor) -> Tensor:
    """[blocks, rows, elements] of any dtype -> bytes [rows, K bytes]."""
    return layouts.unblocked(stored.contiguous().view(torch.uint8))


def _mxint4(a: dict[str, Any]) -> Tensor:
    x, inter = a["hidden_states"], a["intermediate_size"]
    assert x.dtype == torch.bfloat16
    scales = [a["gemm1_weights_scale"], a["gemm2_weights_scale"]]
    assert a["gemm1_weights"].dtype == a["gemm2_weights"].dtype == torch.uint8
    assert all(s.dtype == torch.bfloat16 for s in scales)
    assert a["local_num_experts"] * inter * 2 * x.shape[1] == scales[0].numel() * 32
    assert x.shape[1] % 256 == 0 and inter % 256 == 0
    experts = []
    for e in range(a["local_num_experts"]):
        parts = []
        for which, scale, gated in (("gemm1", scales[0], True), ("gemm2", scales[1], False)):
            codes = numbers.int4(_blocked_rows(a[f"{which}_weights"][e]))
            linear = layouts.untiled(scale[e].reshape(codes.shape[0], codes.shape[1] // 32)).double()
            parts.append(_fused_rows(numbers.blocks(codes, linear), gated))
        experts.append(Expert(*parts, **_constants(a, e)))
    return _layer(a, x.double(), experts, "Swiglu", lambda e, h: numbers.round_bf16(h))


def _fp8_tensor(a: dict[str, Any]) -> Tensor:
    name = launcher.activation(a, ("Swiglu", "SwigluStep", "Relu2"))
    assert a["hidden_states"].dtype == torch.float8_e4m3fn and not a["use_routing_scales_on_input"]
    assert a.get("gemm1_clamp_limit") is None or name == "SwigluStep"
    launcher.weights_shape(a, blocked=False, name=name)
    scalars = ("output1_scales_scalar", "output1_scales_gate_scalar", "output2_scales_scalar")
    for scalar in scalars:
        launcher.per_expert(a, scalar, required=True)
    gated = launcher.halves(name) == 2
    experts = []
    for e in range(a["local_num_experts"]):
        w1 = _fused_rows(numbers.e4m3(a["gemm1_weights"][e]), gated)
        w2 = _fused_rows(numbers.e4m3(a["gemm2_weights"][e]), False)
        factors = [a[scalar][e].item() for scalar in scalars]
        experts.append(Expert(w1, w2, *factors, **_constants(a, e, factors[1], name)))
    x = numbers.e4m3(a["hidden_states"])
    return _layer(a, x, experts, name, lambda e, h: numbers.round_e4m3(h))


def _fp8_channel(a: dict[str, Any]) -> Tensor:
    name = launcher.activation(a, ("Swiglu", "Relu2"))
    launcher.fp8_channel(a, name)
    gated = launcher.halves(name) == 2
    experts = []
    for e in range(a["local_num_experts"]):
        parts = []
        for which, apart in (("gemm1", gated), ("gemm2", False)):
            scale = a[f"{which}_per_channel_weight_scale"][e].double()
            parts.append(_fused_rows(numbers.e4m3(a[f"{which}_weights"][e]) * scale[:, None], apart))
        factors = [
            a[f"{which}_scalar"][e].item() for which in ("output1_scales", "output1_scales_gate", "output2_scales")
        ]
        experts.append(Expert(*parts, *factors))
    x = numbers.e4m3(a["hidden_states"]) * a["hidden_states_scale"].double()
    return _layer(a, x, experts, name, lambda e, h: numbers.through_fp8_groups(_written(h), h.shape[-1]))


def _mxfp8(a: dict[str, Any]) -> Tensor:
    name = launcher.activation(a, ("Swiglu", "SwigluStep", "Geglu", "Relu2"))
    launcher.mxfp8(a, name)
    gated = launcher.halves(name) == 2
    experts = []
    for e in range(a["local_num_experts"]):
        parts = []
        for which, apart in (("gemm1", gated), ("gemm2", False)):
            codes = numbers.e4m3(a[f"{which}_weights"][e])
            scale = layouts.untiled(a[f"{which}_weights_scale"][e].reshape(codes.shape[0], codes.shape[1] // 32))
            parts.append(_fused_rows(numbers.blocks(codes, numbers.e8m0(scale)), apart))
        experts.append(Expert(*parts, **_constants(a, e, name=name)))
    x = numbers.blocks(numbers.e4m3(a["hidden_states"]), numbers.e8m0(a["hidden_states_scale"]))
    return _layer(a, x, experts, name, lambda e, h: numbers.through_mxfp8(h))


def _fp8_block(a: dict[str, Any]) -> Tensor:
    from flashinfer.tllm_enums import Fp8QuantizationType

    launcher.fp8_experts(a)
    if a["quantization_type"] == Fp8QuantizationType.MxFp8:
        return _mxfp8(a)
    name = launcher.activation(a, ("Swiglu",))
    launcher.fp8_block(a)
    from flashinfer.tllm_enums import WeightLayout

    assert a["use_shuffled_weight"] and a["weight_layout"] == WeightLayout.BlockMajorK
    launcher.weights_shape(a, blocked=True, name=name)
    experts = []
    for e in range(a["local_num_experts"]):
        parts = []
        for which in ("gemm1", "gemm2"):
            rows = layouts.unshuffled(_blocked_rows(a[f"{which}_weights"][e]), 16)  # tiles of 64 rows
            scale = a[f"{which}_weights_scale"][e].double()
            wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            parts.append(numbers.e4m3(rows) * wide)
        experts.append(Expert(*parts, **_constants(a, e)))
    x = numbers.blocks(numbers.e4m3(a["hidden_states"]), a["hidden_states_scale"].T.double())
    # The activation is a kernel of its own: the first GEMM writes e4m3 with a scale for 128 values of up or of gate.
    roundings = Roundings(first=numbers.through_fp8_groups, second=numbers.round_bf16)
    return _layer(a, x, experts, name, lambda e, h: numbers.through_fp8_groups(h), roundings=roundings)


def _bf16(a: dict[str, Any]) -> Tensor:
    from flashinfer.tllm_enums import WeightLayout

    name = launcher.activation(a, ("Swiglu", "SwigluStep", "Relu2"))
    w1, w2 = a["gemm1_weights"], a["gemm2_weights"]
    assert a["hidden_states"].dtype == w1.dtype == w2.dtype == torch.bfloat16
    assert a["weight_layout"] == WeightLayout.BlockMajorK and a["use_shuffled_weight"]
    assert w1.shape[3] == w2.shape[3] == 64 and a["intermediate_size"] % 128 == 0
    launcher.weights_shape(a, blocked=True, name=name)
    experts = []
    for e in range(a["local_num_experts"]):
        rows1, rows2 = (_blocked_rows(w[e]).view(torch.bfloat16).double() for w in (w1, w2))
        gated = launcher.halves(name) == 2
        experts.append(Expert(_fused_rows(rows1, gated), _fused_rows(rows2, False), **_constants(a, e, name=name)))
    return _layer(a, a["hidden_states"].double(), experts, name, lambda e, h: numbers.round_bf16(h))


_OPS: dict[str, Callable[[dict[str, Any]], Tensor]] = {
    "trtllm_fp4_block_scale_moe": _fp4,
    "trtllm_mxint4_block_scale_moe": _mxint4,
    "trtllm_fp8_per_tensor_scale_moe": _fp8_tensor,
    "trtllm_fp8_per_tensor_scale_routed_moe": _fp8_tensor,
    "trtllm_fp8_per_channel_scale_moe": _fp8_channel,
    "trtllm_fp8_block_scale_moe": _fp8_block,
    "trtllm_bf16_moe": _bf16,
}
