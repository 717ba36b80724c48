"""What the C++ launchers check before they run, as assertions on the bound arguments."""

from __future__ import annotations

import os
from typing import Any

import torch

from . import cpp

F8, BF16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32


def common(a: dict[str, Any]) -> None:
    experts, local, offset = a["num_experts"], a["local_num_experts"], a["local_expert_offset"]
    assert 0 < a["top_k"] <= experts
    assert 0 < local <= experts and offset >= 0 and offset + local <= experts
    assert a["hidden_states"].ndim == 2 and a["hidden_states"].is_contiguous()
    assert a["output"].dtype == BF16 and a["do_finalize"]
    for name in ("hidden_states", "output"):
        assert a[name].data_ptr() % 16 == 0, f"{name}: an access of 128 bits to an address that 16 does not divide"
    for name in ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit"):
        per_expert(a, name)


def per_expert(a: dict[str, Any], name: str, required: bool = False) -> None:
    """An optional float32 tensor [local experts]."""
    tensor = a.get(name)
    if tensor is None:
        assert not required, name
        return
    assert tensor.dtype == F32 and tensor.shape == (a["local_num_experts"],) and tensor.is_contiguous(), name


def usual_nvfp4(a: dict[str, Any]) -> None:
    """Where intermediates are quantized to NVFP4: not by the rule that 4OVER6 asks for, which is not modelled."""
    rule = a.get("nvfp4_4over6_code", -1)  # -1, and releases that take no rule: as the environment says
    from_environment = os.environ.get("FLASHINFER_NVFP4_4OVER6") == "1" and "4OVER6" in cpp.source(cpp.ENVIRONMENT)
    assert rule == 0 or (rule == -1 and not from_environment), f"nvfp4_4over6_code is {rule}: FLASHINFER_NVFP4_4OVER6"


def activation(a: dict[str, Any], allowed: tuple[str, ...]) -> str:
    """FlashInfer's name of the activation that the number means in this release."""
    from flashinfer.tllm_enums import ActivationType

    name = ActivationType(a.get("act_type", a.get("activation_type"))).name
    assert name in allowed, name
    if name == "SwigluStep":
        assert a.get("gemm1_alpha") is None and a.get("gemm1_beta") is None
    return name


def halves(name: str) -> int:
    return 2 if name in ("Swiglu", "SwigluStep", "Geglu") else 1


def fp4(a: dict[str, Any], name: str) -> tuple[int, int]:
    """Checks of trtllm_fp4_block_scale_moe. Returns values a scale of activations (0: bf16) and of weights."""
    x, scale, w1, s1 = (a[n] for n in ("hidden_states", "hidden_states_scale", "gemm1_weights", "gemm1_weights_scale"))
    hidden = x.shape[1] * (2 if x.dtype == torch.uint8 else 1)
    assert w1.dtype == a["gemm2_weights"].dtype == torch.uint8
    assert s1.dtype == a["gemm2_weights_scale"].dtype == F8
    assert x.dtype in (torch.uint8, BF16, F8)
    values = a["local_num_experts"] * a["intermediate_size"] * halves(name) * hidden
    weight_vec = 32 if values // s1.numel() > 16 else 16
    assert s1.numel() >= values // weight_vec
    act_vec = 0 if scale is None else x.shape[0] * hidden // scale.numel()
    if x.dtype == torch.uint8:
        assert scale is not None and scale.dtype == F8 and act_vec == 16 and weight_vec == 16
        for scalar in ("output1_scales_scalar", "output1_scales_gate_scalar", "output2_scales_scalar"):
            per_expert(a, scalar, required=True)
    else:
        assert weight_vec == 32 and name != "SwigluStep" and a.get("per_token_scales") is None
        assert (act_vec == 32) == (x.dtype == F8)
    tokens = a.get("per_token_scales")
    assert tokens is None or (tokens.dtype == F32 and tokens.shape == (x.shape[0],) and tokens.is_contiguous())
    for bias, rows in (("gemm1_bias", w1.shape[1]), ("gemm2_bias", a["gemm2_weights"].shape[1])):
        if a[bias] is not None:
            assert a[bias].dtype == F32 and a[bias].shape == (a["local_num_experts"], rows), bias
    assert w1.shape[1] % 128 == 0 and a["gemm2_weights"].shape[1] % 128 == 0, "the shuffle needs whole tiles"
    return act_vec, weight_vec


def weights_shape(a: dict[str, Any], blocked: bool, name: str) -> None:
    """[experts, M, K], or [experts, K / block, M, block]."""
    inter, hidden = a["intermediate_size"], a["hidden_states"].shape[1]
    for which, rows, k in (("gemm1", halves(name) * inter, hidden), ("gemm2", hidden, inter)):
        w = a[f"{which}_weights"]
        assert w.ndim == (4 if blocked else 3), which
        got = (w.shape[2], w.shape[1] * w.shape[3]) if blocked else (w.shape[1], w.shape[2])
        assert got == (rows, k), (which, got, (rows, k))


def fp8_channel(a: dict[str, Any], name: str) -> None:
    x, local = a["hidden_states"], a["local_num_experts"]
    weights_shape(a, blocked=False, name=name)
    assert x.dtype == a["gemm1_weights"].dtype == a["gemm2_weights"].dtype == F8
    assert not a["use_routing_scales_on_input"]
    rows = {"gemm1": halves(name) * a["intermediate_size"], "gemm2": x.shape[1]}
    expected = {f"{which}_per_channel_weight_scale": (local, n) for which, n in rows.items()}
    expected["hidden_states_scale"] = (x.shape[0], 1)
    for argument, shape in expected.items():
        assert a[argument].dtype == F32 and a[argument].shape == shape and a[argument].is_contiguous(), argument
    for scalar in ("output1_scales_scalar", "output1_scales_gate_scalar", "output2_scales_scalar"):
        per_expert(a, scalar, required=True)


def fp8_block(a: dict[str, Any]) -> None:
    from flashinfer.tllm_enums import Fp8QuantizationType

    assert a["quantization_type"] == Fp8QuantizationType.DeepSeekFp8
    x, inter, local = a["hidden_states"], a["intermediate_size"], a["local_num_experts"]
    assert x.dtype == a["gemm1_weights"].dtype == a["gemm2_weights"].dtype == F8
    assert a["hidden_states_scale"].dtype == F32 and a["hidden_states_scale"].is_contiguous()
    assert a["hidden_states_scale"].shape == (x.shape[1] // 128, x.shape[0])
    assert inter % 128 == 0
    assert a["gemm1_weights_scale"].shape == (local, 2 * inter // 128, x.shape[1] // 128)
    assert a["gemm2_weights_scale"].shape == (local, x.shape[1] // 128, inter // 128)
    assert a["gemm1_weights_scale"].dtype == a["gemm2_weights_scale"].dtype == F32


def fp8_experts(a: dict[str, Any]) -> None:
    """Counts of experts and groups, whatever the format of the blocks."""
    from flashinfer.tllm_enums import RoutingMethodType

    experts, top_k, groups, kept = a["num_experts"], a["top_k"], a["n_group"] or 0, a["topk_group"] or 0
    assert experts % 4 == 0 and experts > top_k
    if RoutingMethodType(a["routing_method_type"]).name == "DeepSeekV3":
        assert groups != 0 and kept != 0 and experts % groups == 0
        assert top_k <= (8 if experts <= 384 else 22) and 0 < kept <= 4 and kept <= groups
        assert top_k < kept * experts // groups
    else:
        assert groups <= 1 and kept <= 1 and top_k <= 32


def mxfp8(a: dict[str, Any], name: str) -> None:
    from flashinfer.tllm_enums import WeightLayout

    x, local = a["hidden_states"], a["local_num_experts"]
    weights_shape(a, blocked=False, name=name)
    assert a["use_shuffled_weight"] and a["weight_layout"] == WeightLayout.MajorK
    assert x.dtype == a["gemm1_weights"].dtype == a["gemm2_weights"].dtype == F8
    rows, inter = halves(name) * a["intermediate_size"], a["intermediate_size"]
    for which, numel in (("gemm1", local * rows * x.shape[1]), ("gemm2", local * x.shape[1] * inter)):
        scale = a[f"{which}_weights_scale"]
        assert scale.dtype == torch.uint8 and scale.numel() == numel // 32 and scale.is_contiguous(), which
    assert a["hidden_states_scale"].dtype == torch.uint8 and a["hidden_states_scale"].numel() == x.numel() // 32
    assert x.shape[1] % 128 == 0 and inter % 128 == 0, "the shuffle and the tiles of scales need whole tiles"
