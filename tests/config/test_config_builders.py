"""The builders: signatures of the field, honest docstrings, no lost argument, what each result says."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from typing import Any

import pytest
import torch
from config_samples import CALLS, EXPERTS, HIDDEN, INTER, blocks, build, per_expert, scales, static

from torch_moe_ops import config as moe_config
from torch_moe_ops.config import FusedMoEQuantConfig, get_routing_method_type

# As users call them today (vLLM 0.20.2); the positional order differs between builders.
SIGNATURES = """
def fp8_w8a8_moe_quant_config(w1_scale, w2_scale, a1_scale=None, a2_scale=None, w1_bias=None, w2_bias=None, per_act_token_quant=False, per_out_ch_quant=False, block_shape=None, a1_gscale=None, a2_gscale=None, g1_alphas=None, g2_alphas=None): ...
def int8_w8a8_moe_quant_config(w1_scale, w2_scale, a1_scale, a2_scale, w1_bias=None, w2_bias=None, per_act_token_quant=False): ...
def gptq_marlin_moe_quant_config(w1_scale, w2_scale, weight_bits, group_size, w1_zp=None, w2_zp=None, w1_bias=None, w2_bias=None): ...
def mxfp4_w4a16_moe_quant_config(w1_scale, w2_scale, w1_bias=None, w2_bias=None, gemm1_alpha=None, gemm1_beta=None, gemm1_clamp_limit=None): ...
def mxfp4_mxfp8_moe_quant_config(w1_scale, w2_scale, a1_scale=None, a2_scale=None, w1_bias=None, w2_bias=None, block_shape=None, gemm1_alpha=None, gemm1_beta=None, gemm1_clamp_limit=None, mx_alignment=0): ...
def mxfp4_w4a8_moe_quant_config(w1_scale, w2_scale, a1_scale=None, a2_scale=None, w1_bias=None, w2_bias=None, block_shape=None): ...
def ocp_mx_moe_quant_config(quant_dtype, w1_scale, w2_scale, weight_dtype=None, a1_scale=None, a2_scale=None, w1_bias=None, w2_bias=None, block_shape=None, gemm1_alpha=None, gemm1_beta=None, gemm1_clamp_limit=None): ...
def nvfp4_moe_quant_config(g1_alphas, g2_alphas, a1_gscale, a2_gscale, w1_scale, w2_scale, w1_bias=None, w2_bias=None, is_nvfp4_scale_swizzled=True): ...
def mxfp4_moe_quant_config(w1_scale, w2_scale): ...
def nvfp4_w4a16_moe_quant_config(g1_alphas, g2_alphas, w1_scale, w2_scale): ...
def int4_w4a16_moe_quant_config(w1_scale, w2_scale, w1_zp, w2_zp, block_shape=None): ...
def fp8_w8a16_moe_quant_config(w1_scale, w2_scale, block_shape=None): ...
def int8_w8a16_moe_quant_config(w1_scale, w2_scale, w1_zp, w2_zp, block_shape=None): ...
def int4_w4afp8_moe_quant_config(w1_scale, w2_scale, g1_alphas, g2_alphas, per_act_token_quant=False, per_out_ch_quant=False, block_shape=None): ...
def awq_marlin_moe_quant_config(w1_scale, w2_scale, w1_zp, w2_zp, weight_bits, group_size, w1_bias=None, w2_bias=None): ...
def biased_moe_quant_config(w1_bias, w2_bias): ...
def make(quant_dtype=None, per_act_token_quant=False, per_out_ch_quant=False, block_shape=None, w1_scale=None, w2_scale=None, a1_scale=None, a2_scale=None, g1_alphas=None, g2_alphas=None, a1_gscale=None, a2_gscale=None, w1_bias=None, w2_bias=None, w1_zp=None, w2_zp=None, weight_dtype=None, is_nvfp4_scale_swizzled=True, gemm1_alpha=None, gemm1_beta=None, gemm1_clamp_limit=None): ...
def get_routing_method_type(scoring_func, top_k, renormalize, num_expert_group, has_e_score_bias): ...
def scale_shape(self, max_tokens, hidden_dim): ...
def batched_scale_shape(self, num_experts, max_tokens, hidden_dim): ...
def config_name(self, dtype): ...
"""
FIELD = {f.name: f.args for f in ast.parse(SIGNATURES).body if isinstance(f, ast.FunctionDef)}
BUILDERS = sorted(name for name in moe_config.__all__ if name.endswith("_moe_quant_config"))


def find(name: str) -> Any:
    if name == "get_routing_method_type":
        return get_routing_method_type
    return getattr(FusedMoEQuantConfig, name, None) or getattr(moe_config, name)


def test_all_sixteen_builders_are_here() -> None:
    assert len(BUILDERS) == 16 and set(BUILDERS) == set(CALLS) and set(BUILDERS) <= set(FIELD)


@pytest.mark.parametrize("name", FIELD)
def test_signature_is_that_of_the_field(name: str) -> None:
    """Names, order and defaults of what can be positional; anything of ours is keyword-only and optional."""
    parameters = inspect.signature(find(name)).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in positional] == [a.arg for a in FIELD[name].args]
    defaults = [ast.literal_eval(d) for d in FIELD[name].defaults]
    assert [p.default for p in positional if p.default is not p.empty] == defaults
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in parameters if p not in positional)


@pytest.mark.parametrize("name", [*BUILDERS, "make"])
def test_docstring_mentions_every_parameter(name: str) -> None:
    function = find(name)
    words = set(re.findall(r"\w+", inspect.getdoc(function) or ""))
    missing = [p for p in inspect.signature(function).parameters if p not in words]
    assert not missing, f"{name}: docstring does not mention {missing}"


@pytest.mark.parametrize("name", BUILDERS)
def test_docstring_names_no_parameter_that_is_not_there(name: str) -> None:
    doc = inspect.getdoc(find(name)) or ""
    listed = re.findall(r"^\s{4}((?:\w+, )*\w+): ", doc, flags=re.MULTILINE)
    names = {word for entry in listed for word in entry.split(", ")}
    assert names == set(inspect.signature(find(name)).parameters)


@pytest.mark.parametrize("name", BUILDERS)
def test_no_tensor_argument_is_lost(name: str) -> None:
    arguments = CALLS[name]()
    config = find(name)(**arguments)
    for argument, value in arguments.items():
        if isinstance(value, torch.Tensor) or argument.startswith(("gemm1", "mx_al", "is_nvfp4", "per_")):
            assert getattr(config, argument) is value, argument


# name -> quant_dtype, weight_quant_dtype, scheme, act_format, block_shape, config_name, the one predicate that holds
FP8, INT8 = torch.float8_e4m3fn, torch.int8
MEANING: dict[str, tuple[Any, ...]] = {
    "fp8_w8a8_moe_quant_config": (FP8, FP8, "fp8", "fp8", None, "fp8_w8a8", "use_fp8_w8a8"),
    "fp8_w8a16_moe_quant_config": (None, FP8, "fp8_block", "none", [128, 128], "fp8_w8a16", "use_fp8_w8a16"),
    "int8_w8a8_moe_quant_config": (INT8, INT8, "int8", "int8", None, None, "use_int8_w8a8"),
    "int8_w8a16_moe_quant_config": (None, INT8, "int8", "none", [1, 32], "int8_w8a16", "use_int8_w8a16"),
    "int4_w4a16_moe_quant_config": (None, "int4", "int4", "none", [1, 32], "int4_w4a16", "use_int4_w4a16"),
    "gptq_marlin_moe_quant_config": (None, "int4", "int4", "none", [1, 32], "int4_w4a16", "use_int4_w4a16"),
    "awq_marlin_moe_quant_config": (None, INT8, "int8", "none", [1, 32], "int8_w8a16", "use_int8_w8a16"),
    "int4_w4afp8_moe_quant_config": (FP8, "int4", "int4", "fp8", [1, 32], None, "use_int4_w4afp8"),
    "mxfp4_w4a16_moe_quant_config": (None, "mxfp4", "mxfp4", "none", [1, 32], None, "use_mxfp4_w4a16"),
    "mxfp4_mxfp8_moe_quant_config": ("mxfp8", "mxfp4", "mxfp4", "mxfp8", [1, 32], None, "use_mxfp4_mxfp8"),
    "mxfp4_w4a8_moe_quant_config": (FP8, "mxfp4", "mxfp4", "fp8", [1, 32], None, "use_mxfp4_w4a8"),
    "mxfp4_moe_quant_config": ("mxfp4", "mxfp4", "mxfp4", "mxfp4", [1, 32], None, "use_mxfp4_w4a4"),
    "ocp_mx_moe_quant_config": ("mxfp6_e3m2", "mxfp4", "mxfp4", "mxfp6_e3m2", [1, 32], None, None),
    "nvfp4_moe_quant_config": ("nvfp4", "nvfp4", "nvfp4", "nvfp4", [1, 16], None, "use_nvfp4_w4a4"),
    "nvfp4_w4a16_moe_quant_config": (None, "nvfp4", "nvfp4", "none", [1, 16], None, "use_nvfp4_w4a16"),
    "biased_moe_quant_config": (None, None, "none", "none", None, None, None),
}
PREDICATES = sorted(name for name in dir(FusedMoEQuantConfig) if name.startswith("use_"))


@pytest.mark.parametrize("name", BUILDERS)
def test_meaning_of_every_builder(name: str) -> None:
    act, weight, scheme, act_format, block, named, predicate = MEANING[name]
    config = build(name)
    assert (config.quant_dtype, config.weight_quant_dtype) == (act, weight)
    assert (config.scheme, config.act_format, config.block_shape) == (scheme, act_format, block)
    assert config.is_block_quantized == (block is not None) and config.is_quantized == (act is not None)
    assert config.config_name(torch.bfloat16) == named
    assert [p for p in PREDICATES if getattr(config, p)] == ([predicate] if predicate else [])


def test_config_name_of_float32() -> None:
    assert moe_config.FUSED_MOE_UNQUANTIZED_CONFIG.config_name(torch.float32) == "float32"
    assert moe_config.FUSED_MOE_UNQUANTIZED_CONFIG.config_name(torch.float16) is None
    assert build("mxfp4_w4a16_moe_quant_config").config_name(torch.float32) is None
    assert build("fp8_w8a8_moe_quant_config").config_name(torch.float32) == "fp8_w8a8"


@pytest.mark.parametrize(
    ("name", "act", "weight", "scheme"),
    [
        ("mxfp4_moe_quant_config", "mxfp4", "mxfp4", "w_mxfp4_a_mxfp4"),
        ("mxfp4_w4a16_moe_quant_config", None, "mxfp4", "w_mxfp4"),
        ("mxfp4_mxfp8_moe_quant_config", "mxfp8", "mxfp4", "w_mxfp4_a_mxfp8"),
        ("mxfp4_w4a8_moe_quant_config", FP8, "mxfp4", "w_mxfp4_a_fp8"),
        ("ocp_mx_moe_quant_config", "mxfp6_e3m2", "mxfp4", "w_mxfp4_a_mxfp6_e3m2"),
        ("nvfp4_moe_quant_config", "nvfp4", "nvfp4", None),
        ("fp8_w8a8_moe_quant_config", FP8, FP8, None),
    ],
)
def test_ocp_mx_scheme(name: str, act: Any, weight: Any, scheme: str | None) -> None:
    config = build(name)
    assert (config.quant_dtype, config.weight_quant_dtype, config.ocp_mx_scheme) == (act, weight, scheme)


@pytest.mark.parametrize(
    ("name", "changes", "error", "text"),
    [
        ("fp8_w8a8_moe_quant_config", {"w1_scale": None}, TypeError, "w1_scale must be a Tensor, got NoneType"),
        ("nvfp4_moe_quant_config", {"g2_alphas": None}, TypeError, "g2_alphas must be a Tensor, got NoneType"),
        ("awq_marlin_moe_quant_config", {"w2_zp": None}, TypeError, "w2_zp must be a Tensor, got NoneType"),
        ("gptq_marlin_moe_quant_config", {"w1_zp": None}, ValueError, "w1_zp must be given where w2_zp is, got None"),
        ("gptq_marlin_moe_quant_config", {"weight_bits": 3}, ValueError, "weight_bits must be 4 or 8, got 3"),
        ("gptq_marlin_moe_quant_config", {"group_size": 0}, ValueError, "group_size must be -1 (the whole row) or at"),
        ("gptq_marlin_moe_quant_config", {"group_size": -2}, ValueError, "group_size must be at least -1, got -2"),
        ("ocp_mx_moe_quant_config", {"quant_dtype": "mxfp8_e4m3"}, ValueError, "quant_dtype must be 'mxfp8', whose"),
        ("ocp_mx_moe_quant_config", {"quant_dtype": "mxfp8_e5m2"}, ValueError, "elements in e5m2 are not supported"),
        ("ocp_mx_moe_quant_config", {"quant_dtype": "nvfp4"}, ValueError, "quant_dtype must be None or one of mxfp4"),
        ("ocp_mx_moe_quant_config", {"weight_dtype": "int4"}, ValueError, "weight_dtype must be one of mxfp4, mxfp6"),
        ("biased_moe_quant_config", {"w1_bias": None, "w2_bias": None}, TypeError, "w1_bias must be a Tensor"),
        ("int4_w4afp8_moe_quant_config", {"g1_alphas": per_expert()}, ValueError, "g1_alphas must be given per output"),
    ],
)
def test_builder_rejects(name: str, changes: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        build(name, **changes)
    assert text in str(caught.value)


def test_whole_row_groups_are_per_channel() -> None:
    one = {"w1_scale": per_expert(1, 2 * INTER), "w2_scale": per_expert(1, HIDDEN), "w1_zp": None, "w2_zp": None}
    config = build("gptq_marlin_moe_quant_config", group_size=-1, **one)
    assert config.per_out_ch_quant and config.block_shape is None


def test_fp8_flags() -> None:
    name = "fp8_w8a8_moe_quant_config"
    plain: dict[str, Any] = dict.fromkeys(("a1_gscale", "a2_gscale", "g1_alphas", "g2_alphas", "a1_scale", "a2_scale"))
    channel = {"w1_scale": per_expert(2 * INTER, 1), "w2_scale": per_expert(HIDDEN)}
    config = build(name, **plain, **channel, per_act_token_quant=True, per_out_ch_quant=True)
    assert config.per_act_token_quant and config.is_per_act_token and config.per_out_ch_quant
    assert not config.is_per_tensor and config.block_shape is None and config.scheme == "fp8"
    config = build(name, **plain, **scales(128, 128), block_shape=[128, 128])
    assert config.block_shape == [128, 128] and config.scheme == "fp8_block" and not config.per_act_token_quant
    assert build(name).is_per_tensor and not build(name).per_out_ch_quant
    for flag in ("per_act_token_quant", "per_out_ch_quant"):
        with pytest.raises(ValueError, match=f"{flag} must be False where block_shape is given"):
            build(name, **plain, **scales(128, 128), block_shape=[128, 128], **{flag: True})


def test_mxfp4_w4a8_scales_are_per_token_unless_static() -> None:
    name = "mxfp4_w4a8_moe_quant_config"
    for block in (None, [1, 32]):  # which is the weights'
        dynamic = build(name, a1_scale=None, a2_scale=None, block_shape=block)
        assert dynamic.is_per_act_token and dynamic.scale_shape(5, 70) == (5, 1)
        assert build(name, block_shape=block, **static()).is_per_tensor


def test_precision_config_stands_in_for_mxfp4_scales() -> None:
    precision = type("PrecisionConfig", (), {})
    first, second = precision(), precision()
    config = build("mxfp4_w4a16_moe_quant_config", w1_scale=first, w2_scale=second)
    assert config.w1_precision is first and config.w2_precision is second
    with pytest.raises(TypeError, match="w1_scale must be a Tensor"):
        _ = config.w1_scale
    with pytest.raises(TypeError, match="w2_precision must be a PrecisionConfig"):
        _ = build("mxfp4_w4a16_moe_quant_config").w2_precision
    with pytest.raises(TypeError, match="w2_scale must be of the same kind as w1_scale"):
        build("mxfp4_w4a16_moe_quant_config", w1_scale=first)
    with pytest.raises(TypeError, match="w1_scale must be a Tensor for weights of dtype int4"):
        build("int4_w4a16_moe_quant_config", w1_scale=first, w2_scale=second)


def test_swizzled_scales_as_tiles_or_flat() -> None:
    def pad(n: int, tile: int) -> int:
        return -(-n // tile) * tile

    shapes = [(pad(s.shape[1], 128), pad(s.shape[2], 4)) for s in blocks(1, 16)]
    tiles = [torch.zeros(EXPERTS, *s, dtype=FP8) for s in shapes]
    flat = [t.flatten(1) for t in tiles]
    for w1, w2 in (tiles, flat):
        # The flag is about scales of activations.
        for flag in (True, False):
            config = build("nvfp4_moe_quant_config", w1_scale=w1, w2_scale=w2, is_nvfp4_scale_swizzled=flag)
            assert config.is_nvfp4_scale_swizzled == flag and config.scale_layout is None
        assert dataclasses.replace(config, scale_layout="swizzled").scale_layout == "swizzled"
    with pytest.raises(ValueError, match="w1_scale must be swizzled"):
        dataclasses.replace(build("nvfp4_moe_quant_config"), scale_layout="swizzled")
    with pytest.raises(ValueError, match="w2_scale must be swizzled like w1_scale"):
        build("nvfp4_moe_quant_config", w1_scale=flat[0])
