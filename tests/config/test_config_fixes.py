"""One test for each known defect of these objects elsewhere, named after it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from config_samples import CALLS, EXPERTS, blocks, build, layer_config, per_expert, scales, static

from torch_moe_ops.config import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    FusedMoEQuantConfig,
    FusedMoEQuantDesc,
    GroupShape,
    mxfp4_mxfp8_moe_quant_config,
)
from torch_moe_ops.config.formats import FORMATS, OCP_MX_DTYPES

make = FusedMoEQuantConfig.make
FP8 = torch.float8_e4m3fn
ONE_BY_16, ONE_BY_32 = GroupShape(1, 16), GroupShape(1, 32)


@pytest.mark.parametrize("hidden", [16, 64, 100, 2880, 7168])
@pytest.mark.parametrize("tokens", [0, 1, 33])
@pytest.mark.parametrize(("dtype", "block"), [("nvfp4", 16), *((mx, 32) for mx in OCP_MX_DTYPES)])
def test_w13_scale_shape_of_block_formats(dtype: str, block: int, tokens: int, hidden: int) -> None:
    assert make(dtype).scale_shape(tokens, hidden) == (tokens, math.ceil(hidden / block))
    assert make(dtype).batched_scale_shape(5, tokens, hidden) == (5, tokens, math.ceil(hidden / block))


def test_fix_1_blocks_are_recorded_in_the_descriptors() -> None:
    for name, act, weight in (
        ("nvfp4_moe_quant_config", ONE_BY_16, ONE_BY_16),
        ("nvfp4_w4a16_moe_quant_config", None, ONE_BY_16),
        ("mxfp4_moe_quant_config", ONE_BY_32, ONE_BY_32),
        ("mxfp4_w4a16_moe_quant_config", None, ONE_BY_32),
        ("mxfp4_mxfp8_moe_quant_config", ONE_BY_32, ONE_BY_32),
        ("mxfp4_w4a8_moe_quant_config", GroupShape.PER_TENSOR, ONE_BY_32),
    ):
        config = build(name)
        assert (config._a1.shape, config._a2.shape) == (act, act), name
        assert (config._w1.shape, config._w2.shape) == (weight, weight), name


def test_fix_2_weights_and_activations_are_validated() -> None:
    nvfp4 = "nvfp4_moe_quant_config"
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"w1_scale": blocks(1, 16)[0]}, "w1_scale must have a dtype"),
        ({"w1_scale": blocks(1, 32, FP8)[0]}, "w1_scale must have 4 blocks along K"),
        ({"w2_scale": blocks(1, 16, FP8)[1].to("meta")}, "w2_scale must be on cpu"),
        ({"g1_alphas": torch.ones(EXPERTS, 4)}, r"g1_alphas must have shape \(num_experts,\) or \(num_experts, 2\)"),
        ({"a2_gscale": None}, "a2_gscale must be given where a1_gscale is"),
    ]
    for changes, text in wrong:
        with pytest.raises(ValueError, match=text):
            build(nvfp4, **changes)
    for alphas in (per_expert(), per_expert(2)):
        assert build(nvfp4, g1_alphas=alphas).g1_alphas is alphas


def test_fix_3_alpha_gscale_and_channel_scale_are_fields_of_their_own() -> None:
    static_nvfp4 = build("nvfp4_moe_quant_config")
    assert static_nvfp4._a1.gscale is static_nvfp4.a1_gscale and static_nvfp4._a1.alpha is None
    assert static_nvfp4._w1.alpha is static_nvfp4.g1_alphas and static_nvfp4._w1.gscale is None
    assert static_nvfp4.w1_channel_scale is None
    weight_only = build("nvfp4_w4a16_moe_quant_config")
    assert weight_only._w1.alpha is weight_only.g1_alphas
    w4a8 = build("int4_w4afp8_moe_quant_config")
    assert w4a8._w1.channel_scale is w4a8.g1_alphas is w4a8.w1_channel_scale and w4a8._w1.alpha is None
    for config in (static_nvfp4, weight_only, w4a8):
        assert config._w1.alpha_or_gscale is config.g1_alphas and config._w2.alpha_or_gscale is config.g2_alphas


@pytest.mark.parametrize("field", ["_w1", "scale_layout", "gemm1_alpha"])
def test_fix_4_a_shared_config_cannot_be_changed(field: str) -> None:
    config = build("mxfp4_w4a16_moe_quant_config")
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, field, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config._w1.scale = None  # type: ignore[misc]
    assert config.w1_scale is not None


def test_fix_4_nothing_is_cached_and_validate_is_explicit() -> None:
    config = build("mxfp4_w4a16_moe_quant_config")
    assert config.ocp_mx_scheme == "w_mxfp4"
    config.validate()
    # Someone who forces his way past the freeze finds every answer changed, not half of them.
    object.__setattr__(config, "_a1", FusedMoEQuantDesc("mxfp4"))
    assert config.ocp_mx_scheme == "w_mxfp4_a_mxfp4" and config.use_mxfp4_w4a4
    with pytest.raises(ValueError, match=r"_a2\.dtype must be mxfp4 like that of a1"):
        config.validate()


def test_fix_5_use_fp8_w8a8_looks_at_the_weights_too() -> None:
    w4a8 = build("int4_w4afp8_moe_quant_config")
    assert w4a8.quant_dtype == FP8 and not w4a8.use_fp8_w8a8 and w4a8.config_name(torch.bfloat16) is None
    assert not make(FP8, weight_dtype="nvfp4").use_fp8_w8a8 and not make(FP8, weight_dtype="nvfp4").use_nvfp4_w4a4
    assert not make(FP8, weight_dtype="mxfp4").use_fp8_w8a8
    assert make(FP8).use_fp8_w8a8


def test_fix_6_mx_alignment_through_make_and_one_layout_tag() -> None:
    config = make("mxfp8", mx_alignment=128)
    assert config.mx_alignment == 128 and config.scale_shape(2, 2880) == (2, 92)
    # One tag for weights; the flag of activations says nothing about it.
    assert make("mxfp8", scale_layout="swizzled", is_nvfp4_scale_swizzled=False).scale_layout == "swizzled"
    assert make("mxfp8").scale_layout is make("nvfp4").scale_layout is None


@pytest.mark.parametrize("weight", OCP_MX_DTYPES)
@pytest.mark.parametrize("act", [None, *OCP_MX_DTYPES])
def test_fix_7_every_ocp_mx_pair_is_complete_or_refused(act: str | None, weight: str) -> None:
    name = "ocp_mx_moe_quant_config"
    if act not in FORMATS[weight].activations:
        with pytest.raises(ValueError, match="quant_dtype must be one of"):
            build(name, quant_dtype=act, weight_dtype=weight)
        return
    config = build(name, quant_dtype=act, weight_dtype=weight)
    # Both GEMMs have the same activation format: the second is not silently left unquantized.
    assert config._a1.dtype == config._a2.dtype == act
    assert config.act_format == (act or "none")
    assert config.ocp_mx_scheme == (f"w_{weight}_a_{act}" if act else f"w_{weight}")
    assert config.scale_shape(3, 64) == ((3, 2) if act else None)


def test_fix_7_mxfp6_must_name_its_elements() -> None:
    with pytest.raises(ValueError, match="quant_dtype must name its elements: 'mxfp6_e3m2' or 'mxfp6_e2m3'"):
        build("ocp_mx_moe_quant_config", quant_dtype="mxfp6")


def test_fix_8_w14_no_builder_argument_is_dropped() -> None:
    """Each of these was accepted and forgotten; now it shows in the config, or is an error."""
    for field in ("a1_scale", "a2_scale"):
        with pytest.raises(ValueError, match=r"must be None|must be given where"):
            build("mxfp4_mxfp8_moe_quant_config", **{field: torch.ones(())})
    with pytest.raises(
        ValueError, match="a1_scale must be None: activations are mxfp8, whose block scales are dynamic"
    ):
        build("mxfp4_mxfp8_moe_quant_config", **static())
    with pytest.raises(ValueError, match=r"block_shape must be \[1, 32\] or None for mxfp4, got \[128, 128\]"):
        build("mxfp4_mxfp8_moe_quant_config", block_shape=[128, 128])
    given = static()
    assert build("mxfp4_w4a8_moe_quant_config", block_shape=None, **given).a2_scale is given["a2_scale"]
    assert build("mxfp4_mxfp8_moe_quant_config", mx_alignment=64).mx_alignment == 64


def test_w14_mxfp4_w4a8_dtype_is_one_that_make_takes() -> None:
    config = build("mxfp4_w4a8_moe_quant_config")
    same = make(config.quant_dtype, weight_dtype=config.weight_quant_dtype)
    assert same.use_mxfp4_w4a8 and config.quant_dtype == make("fp8").quant_dtype == FP8


def test_w14_mxfp4_mxfp8_activations_are_what_its_docstring_says() -> None:
    doc = mxfp4_mxfp8_moe_quant_config.__doc__ or ""
    assert "mxfp8 activations" in doc and "mxfp4 activations" not in doc
    assert build("mxfp4_mxfp8_moe_quant_config").act_format == "mxfp8"


@pytest.mark.parametrize("name", ["gptq_marlin", "awq_marlin", "int4_w4a16", "int8_w8a16", "fp8_w8a16"])
def test_fix_weight_only_configs_have_no_activation_shape(name: str) -> None:
    config = build(f"{name}_moe_quant_config")
    assert config._a1.shape is None and config._a2.shape is None and config.scale_shape(4, 64) is None
    assert not config.is_quantized and not config.is_per_act_token and not config.is_per_tensor


def test_fix_fp8_w8a16_reports_the_blocks_of_its_weights() -> None:
    config = build("fp8_w8a16_moe_quant_config")
    assert config.block_shape == [128, 128] and config._w2.shape == (128, 128) and config.is_block_quantized


@pytest.mark.parametrize("zero_row", [[0, 64], [1, 64], (0, 64)])
def test_fix_int4_groups_are_recorded_however_they_are_written(zero_row: Any) -> None:
    arguments = {**scales(1, 64, torch.bfloat16), "w1_zp": None, "w2_zp": None, "block_shape": zero_row}
    assert build("int4_w4a16_moe_quant_config", **arguments)._w1.shape == (1, 64)


def test_fix_awq_checks_its_zero_points_and_is_no_copy_of_gptq() -> None:
    for field in ("w1_zp", "w2_zp"):
        with pytest.raises(TypeError, match=f"awq_marlin_moe_quant_config: {field} must be a Tensor"):
            build("awq_marlin_moe_quant_config", **{field: None})
    symmetric = build("gptq_marlin_moe_quant_config", w1_zp=None, w2_zp=None)
    assert symmetric.w1_zp is None and symmetric.w2_zp is None


def test_fix_4_bit_weight_only_configs_can_have_biases() -> None:
    for name in ("nvfp4_w4a16_moe_quant_config", "int4_w4a16_moe_quant_config"):
        assert build(name).w1_bias is not None and build(name, w1_bias=None, w2_bias=None).w1_bias is None


def test_fix_unquantized_singleton_is_frozen() -> None:
    for name in [f.name for f in dataclasses.fields(FUSED_MOE_UNQUANTIZED_CONFIG)]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(FUSED_MOE_UNQUANTIZED_CONFIG, name, None)


def test_w1_gate_and_up_keep_their_own_global_scales() -> None:
    alphas = torch.tensor([[1.0, 4.0], [2.0, 0.5], [3.0, 3.0]])
    config = build("nvfp4_moe_quant_config", g1_alphas=alphas)
    assert config.g1_alphas is not None and torch.equal(config.g1_alphas, alphas)


def test_w11_gpt_oss_constants_are_arguments() -> None:
    plain = build("mxfp4_w4a16_moe_quant_config", gemm1_alpha=None, gemm1_beta=None, gemm1_clamp_limit=None)
    assert (plain.gemm1_alpha, plain.gemm1_beta, plain.gemm1_clamp_limit) == (None, None, None)
    given = build("mxfp4_w4a16_moe_quant_config", gemm1_alpha=1.5, gemm1_beta=0.0, gemm1_clamp_limit=9.0)
    assert (given.gemm1_alpha, given.gemm1_beta, given.gemm1_clamp_limit) == (1.5, 0.0, 9.0)


def test_w15_activation_format_is_explicit() -> None:
    for name in CALLS:
        config = build(name)
        weight_only = "a16" in name or "marlin" in name or "biased" in name
        assert (config.act_format == "none") == weight_only, name


def test_w15_every_backend_string_that_is_accepted_exists() -> None:
    for wrong in ("flashinfer_trtllm_afp8", "triton_unfused", "xpu", ""):
        with pytest.raises(ValueError, match="moe_backend must be one of"):
            layer_config(moe_backend=wrong)


def test_w24_sizes_that_predicates_missed_are_checked() -> None:
    with pytest.raises(ValueError, match="experts_per_token must lie in"):
        layer_config(experts_per_token=EXPERTS + 1)
    with pytest.raises(ValueError, match="num_local_experts must be 3"):
        layer_config(num_local_experts=EXPERTS - 1)
    with pytest.raises(ValueError, match="in_dtype must be one of"):
        layer_config(in_dtype=torch.float8_e4m3fn)
    assert layer_config(hidden_dim=3584).hidden_dim == 3584  # a latent size of its own


def test_w27_the_clamp_is_carried_and_belongs_to_an_activation_that_has_it() -> None:
    clamped = make(gemm1_clamp_limit=7.0)
    layer_config().validate_quant_config(clamped)
    with pytest.raises(ValueError, match="gemm1_clamp_limit must be None: activation 'relu2' has no such constant"):
        layer_config(activation="relu2").validate_quant_config(clamped)


def test_fix_logical_sizes_are_immutable() -> None:
    for field in ("hidden_dim", "intermediate_size_per_partition", "hidden_dim_unpadded"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(layer_config(), field, 128)


def test_fix_gating_cannot_contradict_the_activation() -> None:
    with pytest.raises(ValueError, match="is_act_and_mul must be False"):
        layer_config(activation="relu2_no_mul", is_act_and_mul=True)
    assert layer_config(activation="relu2_no_mul").is_act_and_mul is False
