"""FusedMoEQuantConfig: what it accepts, what it refuses and in which words, shapes of scales."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from config_samples import EXPERTS, HIDDEN, INTER, biases, blocks, build, per_expert

from torch_moe_ops.config import FUSED_MOE_UNQUANTIZED_CONFIG, FusedMoEQuantConfig, FusedMoEQuantDesc, GroupShape
from torch_moe_ops.numerics.swizzle import swizzle_scale

make = FusedMoEQuantConfig.make
FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("arguments", "tokens", "hidden", "expected"),
    [
        ({"quant_dtype": FP8}, 7, 100, (1, 1)),
        ({"quant_dtype": FP8, "per_act_token_quant": True}, 7, 100, (7, 1)),
        ({"quant_dtype": FP8, "block_shape": [128, 128]}, 7, 300, (7, 3)),
        ({"quant_dtype": torch.int8, "per_act_token_quant": True}, 7, 100, (7, 1)),
        (
            {"quant_dtype": FP8, "weight_dtype": "int4", "block_shape": [0, 32], "per_act_token_quant": True},
            *(7, 100, (7, 1)),
        ),
        ({"quant_dtype": "mxfp6_e2m3"}, 0, 96, (0, 3)),
        ({"quant_dtype": "mxfp8", "mx_alignment": 256}, 7, 2880, (7, 96)),
        ({"weight_dtype": "int4", "block_shape": [1, 64]}, 7, 100, None),
        ({}, 7, 100, None),
    ],
)
def test_scale_shape(arguments: dict[str, Any], tokens: int, hidden: int, expected: tuple[int, int] | None) -> None:
    config = make(**arguments)
    assert config.scale_shape(tokens, hidden) == expected
    assert config.batched_scale_shape(5, tokens, hidden) == (None if expected is None else (5, *expected))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"quant_dtype": "nvfp4", "per_act_token_quant": True}, "per_act_token_quant must be False for activations of"),
        ({"per_act_token_quant": True}, "per_act_token_quant must be False for activations of dtype None, got True"),
        ({"per_out_ch_quant": True}, "per_out_ch_quant must be False for weights of dtype None, got True"),
        ({"quant_dtype": "mxfp4", "per_out_ch_quant": True}, "per_out_ch_quant must be False for weights of dtype mx"),
        ({"quant_dtype": FP8, "block_shape": [128, 128], "per_act_token_quant": True}, "where block_shape is given"),
        ({"quant_dtype": FP8, "block_shape": [128, 128], "per_out_ch_quant": True}, "where block_shape is given"),
        ({"block_shape": [128, 128]}, "block_shape must be None where nothing is quantized, got [128, 128]"),
        (
            {"quant_dtype": "nvfp4", "block_shape": [1, 32]},
            "block_shape must be [1, 16] or None for nvfp4, got [1, 32]",
        ),
        ({"weight_dtype": "mxfp4", "block_shape": [1, 16]}, "block_shape must be [1, 32] or None for mxfp4"),
        ({"quant_dtype": FP8, "block_shape": [0, 128]}, "GroupShape: row must be -1 (all) or at least 1, got 0"),
        ({"quant_dtype": "int4"}, "quant_dtype must not be int4: activations have no 4-bit integer format"),
        ({"quant_dtype": "mxfp8", "weight_dtype": "nvfp4"}, "quant_dtype must be one of nvfp4, torch.float8_e4m3fn, N"),
        ({"quant_dtype": "nvfp4", "weight_dtype": FP8}, "for weights torch.float8_e4m3fn, got 'nvfp4'"),
        (
            {"quant_dtype": FP8, "scale_layout": "swizzled"},
            "scale_layout must be 'linear' or None for weights of dtype",
        ),
        (
            {"quant_dtype": "nvfp4", "scale_layout": "tiled"},
            "scale_layout must be 'linear', 'swizzled' or None (not said)",
        ),
        (
            {"quant_dtype": "nvfp4", "is_scale_swizzled": True, "is_nvfp4_scale_swizzled": False},
            "is_scale_swizzled must be False like is_nvfp4_scale_swizzled, its other name, got True",
        ),
        ({"quant_dtype": FP8, "mx_alignment": 64}, "mx_alignment must be 0 for activations of dtype torch.float8_e4m3"),
        ({"quant_dtype": "mxfp8", "mx_alignment": 40}, "mx_alignment must be a multiple of 32, the MX block, got 40"),
        ({"gemm1_clamp_limit": 0.0}, "gemm1_clamp_limit must be positive, got 0.0"),
        ({"gemm1_alpha": float("nan")}, "gemm1_alpha must be a number, got nan"),
    ],
)
def test_make_rejects_flags(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        make(**arguments)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"quant_dtype": 4}, "quant_dtype must be a dtype, str or None, got int"),
        ({"quant_dtype": FP8, "block_shape": 128}, "block_shape must be a list [rows, columns] or None, got int"),
        ({"quant_dtype": FP8, "block_shape": [128, 128.0]}, "GroupShape: col must be an int, got float"),
        ({"quant_dtype": FP8, "per_act_token_quant": 1}, "per_act_token_quant must be a bool, got int"),
        ({"quant_dtype": "nvfp4", "is_nvfp4_scale_swizzled": 0}, "is_nvfp4_scale_swizzled must be a bool, got int"),
        ({"gemm1_beta": "1"}, "gemm1_beta must be a number or None, got str"),
        ({"quant_dtype": "mxfp8", "mx_alignment": True}, "mx_alignment must be an int, got bool"),
        ({"quant_dtype": FP8, "w1_scale": 1.0, "w2_scale": 1.0}, "scale must be a Tensor, a PrecisionConfig or None"),
    ],
)
def test_make_rejects_types(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError) as caught:
        make(**arguments)
    assert text in str(caught.value)


def half(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float16)


NV, MX = blocks(1, 16, FP8), blocks(1, 32, torch.uint8)
FP8_W8A8, NVFP4, W4A16 = "fp8_w8a8_moe_quant_config", "nvfp4_moe_quant_config", "int4_w4a16_moe_quant_config"
MXFP4, AFP8, BIASED = "mxfp4_w4a16_moe_quant_config", "int4_w4afp8_moe_quant_config", "biased_moe_quant_config"
TENSOR_ERRORS: list[tuple[str, dict[str, Any], str]] = [
    # pairs
    (FP8_W8A8, {"a2_scale": None}, "a2_scale must be given where a1_scale is, got None"),
    (NVFP4, {"a1_gscale": None}, "a1_gscale must be given where a2_gscale is, got None"),
    (W4A16, {"w2_zp": None}, "w2_zp must be given where w1_zp is, got None"),
    # dtypes
    (
        NVFP4,
        {"w1_scale": NV[0].float()},
        "w1_scale must have a dtype of ['torch.float8_e4m3fn'] for nvfp4, got torch.f",
    ),
    (MXFP4, {"w2_scale": MX[1].float()}, "w2_scale must have a dtype of ['torch.uint8', 'torch.float8_e8m0fnu'] for"),
    (FP8_W8A8, {"w1_scale": per_expert().double()}, "w1_scale must have a dtype of ['torch.float32', 'torch.bfloat16'"),
    (FP8_W8A8, {"w2_scale": half(per_expert())}, "w2_scale must have dtype torch.float32 like w1_scale, got torch.flo"),
    (NVFP4, {"g1_alphas": half(per_expert())}, "g1_alphas must have dtype torch.float32, got torch.float16"),
    (NVFP4, {"a1_gscale": half(torch.ones(()))}, "a1_gscale must have dtype torch.float32, got torch.float16"),
    (FP8_W8A8, {"a2_scale": half(torch.ones(()))}, "a2_scale must have dtype torch.float32, got torch.float16"),
    (BIASED, {"w1_bias": biases()["w1_bias"].int()}, "w1_bias must have a float dtype, got torch.int32"),
    (W4A16, {"w1_zp": MX[0].double()}, "w1_zp must have a dtype of ['torch.uint8', 'torch.int8', 'torch.int32'"),
    # shapes
    (NVFP4, {"w1_scale": NV[0][0]}, "w1_scale must have 3 dimensions for blocks of (1, 16), got (192, 4)"),
    (NVFP4, {"g2_alphas": per_expert(2)}, "g2_alphas must have shape (num_experts,), got (3, 2)"),
    (NVFP4, {"g1_alphas": per_expert(3)}, "g1_alphas must have shape (num_experts,) or (num_experts, 2), got (3, 3)"),
    (NVFP4, {"g1_alphas": torch.ones(4)}, "must hold 3 experts like w1_scale, got (4,)"),
    (NVFP4, {"g1_alphas": torch.ones(())}, "must hold 3 experts like w1_scale, got (1,)"),
    (NVFP4, {"a1_gscale": torch.ones(2)}, "a1_gscale must have one element or shape (3,), got (2,)"),
    (NVFP4, {"w1_scale": NV[0][:, :, :3]}, "w1_scale must have 4 blocks along K for the 64 rows of w2_scale, got (3, "),
    (NVFP4, {"w1_scale": NV[0][:, :128]}, "w1_scale must have the rows of w13, gated or not, for 6 blocks of interm"),
    (MXFP4, {"w1_scale": MX[0].flatten(1)}, "w1_scale must have 3 dimensions for blocks of (1, 32), got (3, 384)"),
    (W4A16, {"w1_scale": per_expert()}, "w1_scale must have 3 dimensions for blocks of (1, 32), got (3,)"),
    (W4A16, {"w1_scale": per_expert(), "block_shape": None}, "w1_scale must have 2 to 3 dimensions (num_experts, ...)"),
    (W4A16, {"w1_zp": per_expert().to(torch.uint8)}, "w1_zp must have 2 or 3 dimensions (num_experts, ...), got (3,)"),
    (AFP8, {"g2_alphas": per_expert(HIDDEN, 2)}, "g2_alphas must have shape (num_experts,), (num_experts, rows) or"),
    (BIASED, {"w2_bias": torch.zeros(EXPERTS)}, "w2_bias must have shape (num_experts, rows), got (3,)"),
    (BIASED, {"w2_bias": torch.zeros(2, HIDDEN)}, "w2_bias must hold 3 experts like w1_bias, got (2, 64)"),
    (FP8_W8A8, {"a1_scale": torch.ones(2, 1)}, "a1_scale must have one element or shape (3,), got (2, 1)"),
    (FP8_W8A8, {"w1_scale": torch.ones(0), "w2_scale": torch.ones(0)}, "w1_scale must hold at least one expert"),
    # devices
    (NVFP4, {"w2_scale": NV[1].to("meta")}, "w2_scale must be on cpu like a1_gscale, got meta"),
    # what nothing would read
    (
        "ocp_mx_moe_quant_config",
        {"a1_scale": per_expert(), "a2_scale": per_expert()},
        "a1_scale must be None: activations are mxfp6_e3m2, whose block scales are dynamic",
    ),
    (
        FP8_W8A8,
        {"per_act_token_quant": True},
        "a1_scale must be None where per_act_token_quant is True: scales of tokens go with",
    ),
]


@pytest.mark.parametrize(("name", "changes", "text"), TENSOR_ERRORS)
def test_tensors_are_validated(name: str, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        build(name, **changes)
    message = str(caught.value)
    assert message.startswith("FusedMoEQuantConfig: ") and text in message


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"w1_scale": per_expert(), "w2_scale": per_expert()}, "w1_scale must be None for plain weights, got 'given'"),
        ({"a1_scale": per_expert(), "a2_scale": per_expert()}, "a1_scale must be None: activations are not quantized"),
        (
            {"a1_gscale": per_expert(), "a2_gscale": per_expert()},
            "a1_gscale must be None for activations of dtype None",
        ),
        ({"g1_alphas": per_expert(), "g2_alphas": per_expert()}, "g1_alphas must be None for weights of dtype None"),
        ({"w1_zp": MX[0], "w2_zp": MX[1]}, "w1_zp must be None for weights of dtype None"),
        ({"weight_dtype": "nvfp4", "w1_scale": NV[0], "w2_scale": NV[1]}, "g1_alphas must be given with w1_scale"),
        (
            {"quant_dtype": FP8, "per_act_token_quant": True, "a1_gscale": torch.ones(()), "a2_gscale": torch.ones(())},
            "a1_gscale must be None where per_act_token_quant is True: scales of tokens go with the call",
        ),
    ],
)
def test_make_rejects_tensors_that_nothing_would_read(arguments: dict[str, Any], text: str) -> None:
    arguments.setdefault("is_nvfp4_scale_swizzled", False)
    with pytest.raises(ValueError) as caught:
        make(**arguments)
    assert text in str(caught.value)


def test_operands_must_agree() -> None:
    none, fp8 = FusedMoEQuantDesc(), FusedMoEQuantDesc(FP8, GroupShape.PER_TENSOR)
    token = FusedMoEQuantDesc(FP8, GroupShape.PER_TOKEN)
    int4 = FusedMoEQuantDesc("int4", GroupShape(1, 32))
    with pytest.raises(ValueError, match=r"_a2\.dtype must be torch\.float8_e4m3fn like that of a1, got None"):
        FusedMoEQuantConfig(fp8, none, fp8, fp8)
    with pytest.raises(ValueError, match=r"_a2\.shape must be GroupShape\(row=-1, col=-1\) like that of a1"):
        FusedMoEQuantConfig(fp8, token, fp8, fp8)
    with pytest.raises(ValueError, match=r"_w2\.dtype must be int4 like that of w1"):
        FusedMoEQuantConfig(none, none, int4, FusedMoEQuantDesc("mxfp4"))
    with pytest.raises(ValueError, match=r"_a1\.bias must be None: it belongs to a weight"):
        FusedMoEQuantConfig(dataclasses.replace(none, bias=torch.zeros(2, 4)), none, none, none)
    with pytest.raises(ValueError, match=r"_w1\.gscale must be None: it belongs to an activation"):
        FusedMoEQuantConfig(none, none, dataclasses.replace(none, gscale=torch.ones(())), none)
    with pytest.raises(TypeError, match="_w2 must be a FusedMoEQuantDesc, got str"):
        FusedMoEQuantConfig(none, none, none, "int4")  # type: ignore[arg-type]


def test_description_without_tensors_is_enough() -> None:
    config = make("nvfp4")
    assert config.use_nvfp4_w4a4 and config.w1_scale is None and config.g1_alphas is None
    assert config.w1_precision is None and config.w1_zp is None and config.w2_bias is None


def test_swizzled_scales_of_the_library_are_accepted() -> None:
    w1, w2 = (swizzle_scale(s.view(torch.uint8)).view(FP8) for s in blocks(1, 16, FP8))
    config = build(NVFP4, w1_scale=w1, w2_scale=w2, is_nvfp4_scale_swizzled=True)
    assert config.w1_scale is w1 and w1.shape == (EXPERTS, 256 * 4) and 2 * INTER <= 256


def test_unquantized_constant() -> None:
    config = FUSED_MOE_UNQUANTIZED_CONFIG
    assert not config.is_quantized and config.scheme == config.act_format == "none"
    assert config.block_shape is None and config.ocp_mx_scheme is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        config._w1 = FusedMoEQuantDesc("int4")  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config._w1.bias = torch.zeros(1, 1)  # type: ignore[misc]
