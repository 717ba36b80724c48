"""What callers of the field pass, in its older and newer releases: names, positions, enums, shapes; and equality."""

from __future__ import annotations

import copy
import dataclasses
import enum
import inspect
from typing import Any

import pytest
import torch
from config_samples import CALLS, EXPERTS, build, layer_config, per_expert

import torch_moe_ops as moe
from torch_moe_ops import config as moe_config
from torch_moe_ops.config import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig, FusedMoEQuantDesc

NVFP4 = "nvfp4_moe_quant_config"
CONSTANTS = {"gemm1_alpha": 1.5, "gemm1_beta": 0.5, "gemm1_clamp_limit": 6.0}


@pytest.mark.parametrize("name", ["is_nvfp4_scale_swizzled", "is_scale_swizzled"])
@pytest.mark.parametrize("value", [True, False])
def test_the_flag_of_activation_scales_has_two_names(name: str, value: bool) -> None:
    nvfp4 = FusedMoEQuantDesc("nvfp4")
    swizzled: Any = {name: value}
    for config in (
        FusedMoEQuantConfig(nvfp4, nvfp4, nvfp4, nvfp4, **swizzled),
        FusedMoEQuantConfig.make("nvfp4", **swizzled),
        moe_config.nvfp4_moe_quant_config(**{**CALLS[NVFP4](), "is_nvfp4_scale_swizzled": True, **swizzled}),
        dataclasses.replace(FusedMoEQuantConfig.make("mxfp8"), **swizzled),
    ):
        assert config.is_nvfp4_scale_swizzled is config.is_scale_swizzled is value


def test_the_flag_is_the_fifth_field() -> None:
    none = FusedMoEQuantDesc()
    config = FusedMoEQuantConfig(none, none, none, none, False, 1.5, 0.5, 6.0, 0)
    assert not config.is_nvfp4_scale_swizzled
    assert (config.gemm1_alpha, config.gemm1_beta, config.gemm1_clamp_limit) == (1.5, 0.5, 6.0)
    with pytest.raises(TypeError, match="is_scale_swizzled must be a bool, got int"):
        FusedMoEQuantConfig(none, none, none, none, is_scale_swizzled=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(CALLS))
def test_every_builder_takes_the_constants_of_the_activation(name: str) -> None:
    config = build(name, **CONSTANTS)
    assert (config.gemm1_alpha, config.gemm1_beta, config.gemm1_clamp_limit) == tuple(CONSTANTS.values())


@pytest.mark.parametrize("name", ["fp8_w8a16_moe_quant_config", "int8_w8a16_moe_quant_config"])
def test_8_bit_weight_only_builders_take_biases(name: str) -> None:
    bias = {"w1_bias": torch.zeros(EXPERTS, 192), "w2_bias": torch.zeros(EXPERTS, 64)}
    assert build(name, **bias).w1_bias is bias["w1_bias"] and build(name, **bias).w2_bias is bias["w2_bias"]


def test_alphas_of_one_expert_may_be_squeezed() -> None:
    scales = {"w1_scale": torch.tensor([0.5]), "w2_scale": torch.tensor([0.25])}
    inputs = {"a1_scale": torch.tensor(0.125), "a2_scale": torch.tensor(0.5)}
    alphas = {f"g{i}_alphas": (scales[f"w{i}_scale"] * inputs[f"a{i}_scale"]).squeeze() for i in (1, 2)}
    assert alphas["g1_alphas"].ndim == 0
    config = moe_config.fp8_w8a8_moe_quant_config(**scales, **inputs, **alphas)
    assert config.g1_alphas is not None and config.g1_alphas.shape == (1,) and config.g2_alphas == alphas["g2_alphas"]
    w13, w2 = (torch.randn(1, n, k).to(torch.float8_e4m3fn) for n, k in ((64, 16), (16, 32)))
    raw = moe.RawWeights.from_quant_config(w13, w2, config)
    assert raw.w13_scale is not None and torch.equal(raw.w13_scale.flatten(), scales["w1_scale"])


# -- equality ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(CALLS))
def test_configs_are_equal_by_value(name: str) -> None:
    config = build(name)
    for same in (build(name), copy.deepcopy(config), dataclasses.replace(config)):
        assert same == config and hash(same) == hash(config)
    assert config != dataclasses.replace(config, gemm1_clamp_limit=3.25) and config != "nvfp4"


def test_configs_differ_by_one_bit_of_one_tensor() -> None:
    config = build(NVFP4)
    other = per_expert()
    other[1] = torch.nextafter(other[1], torch.tensor(2.0))
    assert build(NVFP4, g2_alphas=other) != config and build(NVFP4, w1_bias=None, w2_bias=None) != config
    assert config._w1 == build(NVFP4, g2_alphas=other)._w1 and config._w2 != build(NVFP4, g2_alphas=other)._w2
    nan = torch.full((EXPERTS, 4), torch.nan)
    assert FusedMoEQuantDesc(bias=nan) == FusedMoEQuantDesc(bias=nan.clone()) != FusedMoEQuantDesc(bias=nan.to("meta"))


# -- the layer's config ------------------------------------------------------------------------------------------------


def test_positions_after_the_dtype_of_the_logits() -> None:
    names = list(inspect.signature(FusedMoEConfig).parameters)
    after = names[names.index("router_logits_dtype") + 1 :]
    assert after[:6] == [
        "moe_backend",
        "max_num_tokens",
        "has_bias",
        "is_act_and_mul",
        "is_lora_enabled",
        "disable_inplace",
    ]
    layer = layer_config()
    first = [getattr(layer, n) for n in names[: names.index("router_logits_dtype") + 1]]
    made = FusedMoEConfig(*first, "cpu", 64, True, True, False, False)
    assert (made.moe_backend, made.max_num_tokens, made.has_bias, made.disable_inplace) == ("cpu", 64, True, False)
    # Whoever passes unpadded sizes by place, as another release has them, hears of it.
    with pytest.raises(ValueError, match=r"moe_backend must be one of auto, .*, got 64"):
        FusedMoEConfig(*first, 64, 96)
    assert layer_config(hidden_dim_unpadded=60).hidden_dim_unpadded == 60


class MoEActivation(enum.Enum):
    """As the field has it."""

    SILU = "silu"
    RELU2_NO_MUL = "relu2_no_mul"
    OTHER = "swish"


def test_an_activation_may_be_an_enum() -> None:
    assert layer_config(activation=MoEActivation.SILU) == layer_config(activation="silu")
    layer = layer_config(activation=MoEActivation.RELU2_NO_MUL)
    assert layer.activation == "relu2_no_mul" and not layer.is_gated
    assert moe.explain(config=layer).problem.activation == "relu2_no_mul"
    with pytest.raises(ValueError, match=r"activation must be one of silu, .*, got 'swish'"):
        layer_config(activation=MoEActivation.OTHER)


@pytest.mark.parametrize(
    "name", ["deepep_v2", "mori_high_throughput", "mori_low_latency", "moonep", "passthrough", "pplx"]
)
def test_newer_all_to_all_names(name: str) -> None:
    config = FusedMoEParallelConfig.make(1, 1, 2, 1, enable_expert_parallel=True, dp_rank=0, all2all_backend=name)
    assert config.all2all_backend == name and not config.use_batched_activation_format
    assert layer_config(moe_parallel_config=config, num_experts=6, num_logical_experts=6).use_deepep_v2_kernels == (
        name == "deepep_v2"
    )
