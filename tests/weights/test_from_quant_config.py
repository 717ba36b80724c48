"""RawWeights.from_quant_config: every builder's config runs, and means what its tensors say.

Codes are drawn at random, not quantized, and decoded in float64; the layer is computed by the emulation of the
contract that the C++ kernels are held against, which shares no code with the package.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import cpu_emulation as emulation
import pytest
import torch
from config_samples import layer_config
from quant_config_cases import CASES
from quant_config_weights import (
    EXPERTS,
    FP8,
    HIDDEN,
    INTER,
    Given,
    kernel_scalars,
)
from tolerances import bound, relative_l2

import torch_moe_ops as moe
from torch_moe_ops import config as moe_config
from torch_moe_ops.config import RoutingMethodType


def test_every_builder_has_a_case() -> None:
    builders = {n.removesuffix("_moe_quant_config") for n in moe_config.__all__ if n.endswith("_moe_quant_config")}
    assert len(builders) == 16
    # mxfp4_moe_quant_config is the one whose name has no middle part.
    assert builders - {"mxfp4"} | {"mxfp4_moe", "unquantized"} == {name.partition("__")[0] for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_every_config_runs_and_means_its_tensors(name: str) -> None:
    given = CASES[name]()
    w = moe.prepare(
        given.raw(),
        activation=given.layer.activation,
        act_format=given.config.act_format,
        backend="reference",
    )
    x, weights = torch.randn(7, HIDDEN), torch.rand(7, 2) + 0.1
    ids = torch.stack([torch.randperm(EXPERTS)[:2] for _ in x]).to(torch.int32)
    got, want = moe.fused_moe_routed(x, ids, weights, w), emulation.moe(given.layer, x, ids, weights)
    assert want.isfinite().all() and want.abs().max() > 1e-2
    assert given.config.act_format == given.layer.act_format
    assert relative_l2(got, want) < bound(torch.float32, given.layer.act_format)


@pytest.mark.parametrize("per_expert", [False, True])
@pytest.mark.parametrize("per_half", [False, True])
def test_prepare_gives_the_kernel_scalars_back(per_half: bool, per_expert: bool) -> None:
    """A config's alphas and gscales were made by one product and one division each: nothing is lost on the way."""
    experts = 2000
    scalars = kernel_scalars(per_half, per_expert, experts)
    codes = torch.zeros(experts, 32, 8, dtype=torch.uint8), torch.zeros(experts, 16, 8, dtype=torch.uint8)
    scales = {"w1_scale": torch.ones(experts, 32, 1).to(FP8), "w2_scale": torch.ones(experts, 16, 1).to(FP8)}
    config = moe_config.nvfp4_moe_quant_config(**scalars, **scales, is_nvfp4_scale_swizzled=False)
    raw = moe.RawWeights.from_quant_config(*codes, config, alphas="products")
    w: Any = moe.prepare(raw, act_format="nvfp4", backend="reference")
    assert torch.equal(w.a1_gscale, scalars["a1_gscale"]) and torch.equal(w.a2_gscale, scalars["a2_gscale"])
    for name in ("g1_alphas", "g2_alphas"):
        got, want = getattr(w, name), scalars[name]
        # The product is not onto: a few alphas have no float32 scale_2 that gives them.
        assert (got == want).double().mean() > 0.75
        assert ((got - want).abs() <= torch.finfo(torch.float32).eps * want).all()


def test_weight_only_alphas_are_the_weights_own() -> None:
    given = CASES["nvfp4_w4a16"]()
    raw: Any = given.raw()
    assert torch.equal(raw.w13_scale_2, given.config.g1_alphas[:, None])
    assert torch.equal(raw.w2_scale_2, given.config.g2_alphas)
    assert raw.a13_input_scale is None


def test_constants_of_a_config_are_for_the_activation_that_prepare_names() -> None:
    raw = CASES["mxfp4_w4a16__constants"]().raw()
    w = moe.prepare(raw, activation="swigluoai", backend="reference")
    assert (w.swiglu_alpha, w.swiglu_beta, w.swiglu_limit) == (1.5, 0.75, 2.0)
    with pytest.raises(ValueError, match="swiglu_alpha must be None for activation 'silu'"):
        moe.prepare(raw, backend="reference")


# -- errors ------------------------------------------------------------------------------------------------------------


def changed(name: str, **changes: Any) -> Given:
    return dataclasses.replace(CASES[name](), **changes)


def reconfigured(name: str, build: Callable[[Given], Any]) -> Given:
    given = CASES[name]()
    return dataclasses.replace(given, config=build(given))


ERRORS: dict[str, tuple[Callable[[], Given], str]] = {
    "config": (lambda: changed("biased", config=None), "quant_config must be a FusedMoEQuantConfig, got NoneType"),
    "weight": (lambda: changed("biased", w13=None), "w13 must be a Tensor, got NoneType"),
    "dimensions": (lambda: changed("biased", w2=torch.zeros(3, 4)), r"w2 must have 3 dimensions .*, got \(3, 4\)"),
    "description": (
        lambda: reconfigured("nvfp4_w4a16", lambda g: moe_config.FusedMoEQuantConfig.make(None, weight_dtype="nvfp4")),
        "w2_scale must be a Tensor, got None",
    ),
    "other sizes": (
        lambda: changed("nvfp4_w4a16", w13=torch.zeros(EXPERTS, 2 * INTER, 72, dtype=torch.uint8)),
        r"w13 must have K = hidden_size = 160 \(rows of w2\), got 144",
    ),
    "weight dtype": (lambda: changed("mxfp4_moe", w2=torch.zeros(3, 160, 64)), "w2 must have dtype torch.uint8"),
    "swizzled size": (
        lambda: changed("nvfp4__static_tensor_swizzled", w2=torch.zeros(EXPERTS, 400, 64, dtype=torch.uint8)),
        "w2_scale must hold 512 x 8 swizzled scales per expert for 400 rows of 8 blocks",
    ),
    "uncalibrated": (
        lambda: reconfigured(
            "fp8_w8a8__static_tensor",
            lambda g: moe_config.fp8_w8a8_moe_quant_config(
                g.config.w1_scale, g.config.w2_scale, torch.tensor(torch.inf), torch.tensor(0.5)
            ),
        ),
        "a1_scale must be positive and finite",
    ),
    "scale and gscale": (
        lambda: reconfigured(
            "fp8_w8a8__static_tensor",
            lambda g: moe_config.fp8_w8a8_moe_quant_config(
                g.config.w1_scale,
                g.config.w2_scale,
                *(torch.tensor(0.5),) * 2,
                a1_gscale=torch.tensor(2.0),
                a2_gscale=torch.tensor(3.0),
            ),
        ),
        "a2_gscale must be 1 / a2_scale",
    ),
    "alpha that is no product": (
        lambda: reconfigured(
            "fp8_w8a8__static_tensor",
            lambda g: moe_config.fp8_w8a8_moe_quant_config(
                g.config.w1_scale,
                g.config.w2_scale,
                g1_alphas=2 * g.config.w1_scale,
                g2_alphas=g.config.w2_scale,
            ),
        ),
        "g1_alphas must be w1_scale, got 'other values'",
    ),
    "convention": (
        lambda: changed("gptq_marlin__int4", options={"int4_codes": "biased"}),
        r"int4_codes must be one of \['offset', 'signed'\], got 'biased'",
    ),
    "int4 dtype": (
        lambda: changed("gptq_marlin__int4", w2=torch.zeros(3, 160, 16)),
        r"w2 must have dtype torch.int32 \(8 codes\) or torch.uint8",
    ),
    "int4 bytes": (
        lambda: changed("gptq_marlin__int4", w2=torch.zeros(3, 160, 62, dtype=torch.uint8)),
        "w2 must hold a multiple of 8 codes along K, got '124 codes'",
    ),
    "int8 dtype": (
        lambda: changed("awq_marlin__int8", w2=torch.zeros(3, 160, 16)),
        "w2 must have dtype torch.int8, torch.uint8",
    ),
    "zero point range": (
        lambda: reconfigured(
            "gptq_marlin__int4",
            lambda g: moe_config.gptq_marlin_moe_quant_config(
                g.config.w1_scale,
                g.config.w2_scale,
                4,
                32,
                *(torch.full(s.shape, 17).to(torch.int32) for s in (g.config.w1_scale, g.config.w2_scale)),
            ),
        ),
        r"w2_zp must lie in \[0, 15\] like the codes, got '17 to 17'",
    ),
    "zero point shape": (
        lambda: reconfigured(
            "gptq_marlin__int4",
            lambda g: moe_config.gptq_marlin_moe_quant_config(
                g.config.w1_scale, g.config.w2_scale, 4, 32, *(torch.zeros(3, 4, 20, dtype=torch.int32),) * 2
            ),
        ),
        r"w2_zp must have shape \(3, 160, 4\), \(3, 4, 160\), or be packed along rows, got \(3, 4, 20\)",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_field(name: str) -> None:
    make, text = ERRORS[name]
    given = make()
    with pytest.raises((ValueError, TypeError), match=text):
        given.raw()


class PrecisionConfig:
    """Known by name, as the package that has it is no dependency."""


def test_a_precision_config_is_refused() -> None:
    given = CASES["mxfp4_moe"]()
    config = moe_config.mxfp4_moe_quant_config(PrecisionConfig(), PrecisionConfig())
    with pytest.raises(TypeError, match=r"w1_scale must be a Tensor: .*, got PrecisionConfig"):
        moe.RawWeights.from_quant_config(given.w13, given.w2, config)


# -- explain(config=, quant_config=) -----------------------------------------------------------------------------------


def rank_config(**changes: Any) -> Any:
    """The layer of the cases above, as rank 1 of 2 of twice as many experts."""
    parallel = moe_config.FusedMoEParallelConfig.make(2, 1, 1, 1, enable_expert_parallel=True, tp_rank=1)
    fields: dict[str, Any] = {
        "num_experts": 2 * EXPERTS,
        "num_local_experts": EXPERTS,
        "num_logical_experts": 2 * EXPERTS,
        "hidden_dim": HIDDEN,
        "intermediate_size_per_partition": INTER,
        "routing_method": RoutingMethodType.DeepSeekV3,
        "moe_parallel_config": parallel,
    }
    return layer_config(**{**fields, **changes})


@pytest.mark.parametrize("name", [n for n in CASES if n != "unquantized"])
def test_explain_takes_configs(name: str) -> None:
    """The configs pose the problem that the weights made from them pose; top_k, routing and dtype are known besides."""
    given = CASES[name]()
    gated = given.layer.activation
    config = rank_config(activation=gated, has_bias=given.config.w1_bias is not None)
    found = moe.explain(config=config, quant_config=given.config)
    placed: dict[str, Any] = {"num_experts": 2 * EXPERTS, "local_expert_offset": EXPERTS}
    raw = dataclasses.replace(given.raw(), activation=gated)
    of_raw = moe.explain(raw, act_format=given.config.act_format, **placed)
    known: dict[str, Any] = {"top_k": 2, "routing_method": "deepseek_v3", "dtype": torch.bfloat16}
    assert found.problem == dataclasses.replace(of_raw.problem, **known)
    same = moe.explain(dataclasses.replace(of_raw.problem, **known))
    assert found.chosen == same.chosen and found.against == same.against


def test_explain_takes_the_backend_and_the_device_of_the_config() -> None:
    config = rank_config(device="cuda", moe_backend="reference", routing_method=RoutingMethodType.Llama4)
    found = moe.explain(config=config, capability=(9, 0))
    assert (found.requested, found.problem.device, found.problem.capability) == ("reference", "cuda", (9, 0))
    assert found.problem.scheme == "none" and found.problem.router_weight_on_input
    assert moe.explain(config=config, backend="cpu").requested == "cpu"


def test_explain_refuses_configs_that_contradict_each_other() -> None:
    given = CASES["nvfp4_w4a16"]()
    with pytest.raises(ValueError, match="w1_scale must have shape"):
        moe.explain(config=rank_config(hidden_dim=64), quant_config=given.config)
    calls: list[tuple[dict[str, Any], str]] = [
        ({"quant_config": given.config}, "config must be given with quant_config"),
        ({"what": given.raw(), "config": rank_config()}, "what must be left out where config is given"),
    ]
    for arguments, text in calls:
        with pytest.raises(TypeError, match=text):
            moe.explain(**arguments)
