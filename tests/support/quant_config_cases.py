"""One valid config per builder and way of using it, with the weights beside it and what both mean."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import cpu_emulation as emulation
import torch
from quant_config_weights import (
    E8M0,
    EXPERTS,
    FP8,
    HIDDEN,
    INTER,
    Given,
    along_rows,
    biases,
    flat_swizzle,
    fp8,
    in_words,
    integers,
    kernel_scalars,
    mxfp4,
    mxfp6,
    mxfp8,
    nvfp4,
    of_layer,
    pair,
    positive,
    scaled,
    two_a_byte,
)
from torch import Tensor

from torch_moe_ops import config

moe_config: Any = config  # arguments are spread from tuples and dicts here

CASES: dict[str, Callable[[], Given]] = {}


def case(function: Callable[[], Given]) -> Callable[[], Given]:
    CASES[function.__name__] = function
    return function


@case
def fp8_w8a8__static_tensor() -> Given:
    p, a = pair(fp8("tensor")), (torch.tensor([0.01]), torch.tensor(0.02))
    config = moe_config.fp8_w8a8_moe_quant_config(*p.scales, *a)
    factors: dict[str, Any] = {f"g{i + 1}_alphas": s.expand(EXPERTS) for i, s in enumerate(a)}
    return p.given(config, act_format="fp8", a1_gscale=1 / a[0][0], a2_gscale=1 / a[1], **factors)


@case
def fp8_w8a8__static_expert_with_products_and_biases() -> Given:
    p, a13, a2, bias = pair(fp8("tensor")), positive(EXPERTS) / 80, positive(EXPERTS) / 60, biases()
    config = moe_config.fp8_w8a8_moe_quant_config(
        *p.scales,
        **bias,
        a1_gscale=1 / a13,
        a2_gscale=1 / a2,
        g1_alphas=a13 * p.scales[0],
        g2_alphas=a2 * p.scales[1],
    )
    scalars: dict[str, Any] = {"g1_alphas": a13, "g2_alphas": a2, "a1_gscale": 1 / a13, "a2_gscale": 1 / a2}
    return p.given(config, act_format="fp8", **scalars, **of_layer(bias))


@case
def fp8_w8a8__static_scales_with_products() -> Given:
    """As callers of FlashInfer's CUTLASS kernels make them: every scale, its inverse and the products."""
    p, a = pair(fp8("tensor")), (torch.tensor(0.01), torch.tensor(0.02))
    products = {f"g{i + 1}_alphas": s * p.scales[i] for i, s in enumerate(a)}
    config = moe_config.fp8_w8a8_moe_quant_config(*p.scales, *a, **products)
    factors: dict[str, Any] = {f"g{i + 1}_alphas": s.expand(EXPERTS) for i, s in enumerate(a)}
    return p.given(config, act_format="fp8", a1_gscale=1 / a[0], a2_gscale=1 / a[1], **factors)


@case
def fp8_w8a8__halves_dynamic() -> Given:
    p = pair(fp8("half"))
    return p.given(moe_config.fp8_w8a8_moe_quant_config(*p.scales), act_format="fp8")


@case
def fp8_w8a8__channel_token() -> Given:
    p = pair(fp8("channel"))
    config = moe_config.fp8_w8a8_moe_quant_config(*p.scales, per_act_token_quant=True, per_out_ch_quant=True)
    return p.given(config, act_format="fp8")


@case
def fp8_w8a8__block() -> Given:
    p = pair(fp8("block"))
    config = moe_config.fp8_w8a8_moe_quant_config(*p.scales, block_shape=[128, 128])
    return p.given(config, act_format="fp8", act_group=128)


@case
def fp8_w8a8__block_of_powers_of_two() -> Given:
    p = pair(fp8("block"))
    halves = [torch.randint(122, 126, s.shape, dtype=torch.uint8) for s in p.scales]
    factors = [torch.exp2(h.double() - 127).repeat_interleave(128, 1).repeat_interleave(128, 2) for h in halves]
    values = [c.double() * f[:, : c.shape[1], : c.shape[2]] for c, f in zip(p.codes, factors, strict=True)]
    config = moe_config.fp8_w8a8_moe_quant_config(*(h.view(E8M0) for h in halves), block_shape=[128, 128])
    return Given(config, *p.codes, emulation.Layer(values[0], values[1], act_format="fp8", act_group=128))


@case
def int8_w8a8__channel_token() -> Given:
    p, bias = pair(integers(8, -1)), biases()
    config = moe_config.int8_w8a8_moe_quant_config(*p.scales, None, None, **bias, per_act_token_quant=True)
    return p.stored(lambda c: (c - 128).to(torch.int8)).given(config, act_format="int8", **of_layer(bias))


@case
def int8_w8a8__tensor_static() -> Given:
    p, a = pair(integers(8, -1)), (torch.tensor(0.03), positive(EXPERTS) / 20)
    per_expert = tuple(positive(EXPERTS) / 500 for _ in p.scales)
    codes = [(c - 128).to(torch.int8) for c in p.codes]
    values = [c.double() * s.double()[:, None, None] for c, s in zip(codes, per_expert, strict=True)]
    config = moe_config.int8_w8a8_moe_quant_config(*per_expert, *a)
    scalars: dict[str, Any] = {
        "g1_alphas": a[0].expand(EXPERTS),
        "g2_alphas": a[1],
        "a1_gscale": 1 / a[0],
        "a2_gscale": 1 / a[1],
    }
    return Given(config, codes[0], codes[1], emulation.Layer(values[0], values[1], act_format="int8", **scalars))


@case
def int8_w8a8__halves() -> Given:
    p, per_half, per_expert = pair(integers(8, -1)), positive(EXPERTS, 2) / 500, positive(EXPERTS) / 500
    codes = [(c - 128).to(torch.int8) for c in p.codes]
    factors = per_half.double().repeat_interleave(INTER, 1)[..., None], per_expert.double()[:, None, None]
    layer = emulation.Layer(codes[0] * factors[0], codes[1] * factors[1], act_format="int8")
    return Given(moe_config.int8_w8a8_moe_quant_config(per_half, per_expert, None, None), codes[0], codes[1], layer)


@case
def gptq_marlin__int4() -> Given:
    p, bias = pair(integers(4, 32, scale_dtype=torch.float16)), biases()
    config = moe_config.gptq_marlin_moe_quant_config(*p.scales, 4, 32, **bias)
    return p.stored(in_words).given(config, **of_layer(bias))


@case
def gptq_marlin__int8_whole_rows() -> Given:
    p = pair(integers(8, -1, scale_dtype=torch.bfloat16))
    config = moe_config.gptq_marlin_moe_quant_config(*p.scales, 8, -1)
    return p.stored(lambda c: in_words(c, 8)).given(config)


@case
def gptq_marlin__groups_before_rows() -> Given:
    p = pair(integers(4, 32, zero=True))
    turned = [t.transpose(1, 2).contiguous() for t in (*p.scales, *p.zeros)]
    config = moe_config.gptq_marlin_moe_quant_config(*turned[:2], 4, 32, *turned[2:])
    return p.stored(in_words).given(config)


@case
def awq_marlin__int4_zeros_in_words_of_rows() -> Given:
    p, bias = pair(integers(4, 32, zero=True, scale_dtype=torch.float16)), biases()
    zeros = map(along_rows(in_words), p.zeros)
    config = moe_config.awq_marlin_moe_quant_config(*p.scales, *zeros, 4, 32, **bias)
    return p.stored(in_words).given(config, **of_layer(bias))


@case
def awq_marlin__int8() -> Given:
    p = pair(integers(8, 32, zero=True))
    config = moe_config.awq_marlin_moe_quant_config(*p.scales, *p.zeros, 8, 32)
    return p.stored(lambda c: c.to(torch.uint8)).given(config)


@case
def int4_w4a16__zeros_two_rows_a_byte() -> Given:
    p, bias = pair(integers(4, 32, zero=True, scale_dtype=torch.bfloat16)), biases()
    zeros = map(along_rows(two_a_byte), p.zeros)
    config = moe_config.int4_w4a16_moe_quant_config(*p.scales, *zeros, block_shape=[0, 32], **bias)
    return p.stored(two_a_byte).given(config, **of_layer(bias))


@case
def int4_w4a16__signed() -> Given:
    p = pair(integers(4, -1))
    config = moe_config.int4_w4a16_moe_quant_config(*(s[..., 0] for s in p.scales), None, None)
    return p.stored(lambda c: two_a_byte(c - 8 & 15)).given(config, {"int4_codes": "signed"})


@case
def int4_w4a16__signed_with_zeros() -> Given:
    p = pair(integers(4, 32, zero=True))
    zeros = ((z - 8).to(torch.int8) for z in p.zeros)
    config = moe_config.int4_w4a16_moe_quant_config(*p.scales, *zeros, block_shape=[1, 32])
    return p.stored(lambda c: in_words(c - 8 & 15)).given(config, {"int4_codes": "signed"})


@case
def int4_w4a16__signed_with_packed_zeros() -> Given:
    p = pair(integers(4, 32, zero=True))
    zeros = (along_rows(two_a_byte)(z - 8 & 15) for z in p.zeros)
    config = moe_config.int4_w4a16_moe_quant_config(*p.scales, *zeros, block_shape=[1, 32])
    return p.stored(lambda c: two_a_byte(c - 8 & 15)).given(config, {"int4_codes": "signed"})


@case
def int8_w8a16__groups_with_zeros() -> Given:
    p = pair(integers(8, 32, zero=True))
    zeros = ((z - 128).to(torch.int8) for z in p.zeros)
    config = moe_config.int8_w8a16_moe_quant_config(*p.scales, *zeros, block_shape=[0, 32])
    return p.stored(lambda c: (c - 128).to(torch.int8)).given(config)


@case
def fp8_w8a16__channel() -> Given:
    p = pair(fp8("channel"))
    config = moe_config.fp8_w8a16_moe_quant_config(*(s[..., None] for s in p.scales))
    return p.stored(lambda c: c.view(torch.uint8)).given(config)


@case
def fp8_w8a16__block() -> Given:
    p = pair(fp8("block"))
    return p.given(moe_config.fp8_w8a16_moe_quant_config(*p.scales, block_shape=[128, 128]))


@case
def int4_w4afp8__e4m3_groups_and_channels() -> Given:
    p = pair(integers(4, 32, scale_dtype=torch.float32))
    groups = [positive(*s.shape).to(FP8) for s in p.scales]
    channels = [positive(EXPERTS, s.shape[1]) / 30 for s in p.scales]
    factors = [g.double() * c.double()[..., None] for g, c in zip(groups, channels, strict=True)]
    values = [scaled(c - 8, f, 32) for c, f in zip(p.codes, factors, strict=True)]
    flags = {"per_act_token_quant": True, "per_out_ch_quant": True, "block_shape": [1, 32]}
    config = moe_config.int4_w4afp8_moe_quant_config(*groups, *channels, **flags)
    signed = p.stored(lambda c: in_words(c - 8 & 15))
    layer = emulation.Layer(values[0], values[1], act_format="fp8")
    return Given(config, *signed.codes, layer, {"int4_codes": "signed"})


@case
def mxfp4_w4a16__constants() -> Given:
    p, bias = pair(mxfp4), biases()
    constants = {"gemm1_alpha": 1.5, "gemm1_beta": 0.75, "gemm1_clamp_limit": 2.0}
    config = moe_config.mxfp4_w4a16_moe_quant_config(*p.scales, **bias, **constants)
    gated: dict[str, Any] = {"activation": "swigluoai", "constants": (1.5, 0.75, 2.0)}
    return p.given(config, **gated, **of_layer(bias))


@case
def mxfp4_mxfp8__swizzled() -> Given:
    p = pair(mxfp4)
    plain = moe_config.mxfp4_mxfp8_moe_quant_config(*p.scales, block_shape=[1, 32], mx_alignment=256)
    weights = {
        f"_w{i + 1}": moe_config.FusedMoEQuantDesc("mxfp4", None, flat_swizzle(s)) for i, s in enumerate(p.scales)
    }
    config = dataclasses.replace(plain, **weights, scale_layout="swizzled")
    return p.given(config, act_format="mxfp8")


@case
def mxfp4_w4a8__dynamic() -> Given:
    p, bias = pair(mxfp4), biases()
    config = moe_config.mxfp4_w4a8_moe_quant_config(*(s.view(E8M0) for s in p.scales), **bias)
    return p.given(config, act_format="fp8", **of_layer(bias))


@case
def mxfp4_w4a8__static() -> Given:
    p, a = pair(mxfp4), (torch.tensor(0.01), torch.tensor(0.05))
    config = moe_config.mxfp4_w4a8_moe_quant_config(*p.scales, *a)
    factors: dict[str, Any] = {f"g{i + 1}_alphas": s.expand(EXPERTS) for i, s in enumerate(a)}
    return p.given(config, act_format="fp8", a1_gscale=1 / a[0], a2_gscale=1 / a[1], **factors)


@case
def mxfp4_moe() -> Given:
    p = pair(mxfp4)
    return p.given(moe_config.mxfp4_moe_quant_config(*p.scales), act_format="mxfp4")


@case
def ocp_mx__mxfp4_weights_mxfp6_activations() -> Given:
    p, bias = pair(mxfp4), biases()
    config = moe_config.ocp_mx_moe_quant_config("mxfp6_e3m2", *p.scales, weight_dtype="mxfp4", **bias)
    return p.given(config, act_format="mxfp6_e3m2", **of_layer(bias))


@case
def ocp_mx__mxfp6_four_codes_in_three_bytes() -> Given:
    def pack(codes: Tensor) -> Tensor:
        bits = (codes[..., None] >> torch.arange(6, dtype=torch.uint8)) & 1
        octets = bits.flatten(-2).unflatten(-1, (-1, 8))
        return (octets << torch.arange(8, dtype=torch.uint8)).sum(-1).to(torch.uint8)

    p = pair(mxfp6("e3m2"))
    config = moe_config.ocp_mx_moe_quant_config("mxfp6_e2m3", *p.scales, weight_dtype="mxfp6_e3m2")
    return p.stored(pack).given(config, act_format="mxfp6_e2m3")


@case
def ocp_mx__mxfp6_weight_only() -> Given:
    p = pair(mxfp6("e2m3"))
    return p.given(moe_config.ocp_mx_moe_quant_config(None, *p.scales, weight_dtype="mxfp6_e2m3"))


@case
def ocp_mx__mxfp8() -> Given:
    p = pair(mxfp8)
    return p.given(moe_config.ocp_mx_moe_quant_config("mxfp8", *p.scales), act_format="mxfp8")


@case
def nvfp4__static_tensor_swizzled() -> Given:
    p, scalars, bias = pair(nvfp4), kernel_scalars(False, False), biases()
    swizzled = {f"w{i + 1}_scale": flat_swizzle(s) for i, s in enumerate(p.scales)}
    config = moe_config.nvfp4_moe_quant_config(**scalars, **swizzled, **bias)
    return p.given(config, {"alphas": "products"}, act_format="nvfp4", **scalars, **of_layer(bias))


@case
def nvfp4__static_expert_halves() -> Given:
    p, scalars = pair(nvfp4), kernel_scalars(True, True)
    scales = dict(zip(("w1_scale", "w2_scale"), p.scales, strict=True))
    config = moe_config.nvfp4_moe_quant_config(**scalars, **scales, is_nvfp4_scale_swizzled=False)
    return p.given(config, {"alphas": "products"}, act_format="nvfp4", **scalars)


@case
def nvfp4__alphas_of_an_emulation() -> Given:
    """Weight scales alone beside scalar gscales; the emulation's weight scales are linear, whatever the flag says."""
    p, scalars = pair(nvfp4), kernel_scalars(False, False)
    alone = {f"g{i}_alphas": scalars[f"g{i}_alphas"] * scalars[f"a{i}_gscale"] for i in (1, 2)}
    scales = dict(zip(("w1_scale", "w2_scale"), p.scales, strict=True))
    config = moe_config.nvfp4_moe_quant_config(**{**scalars, **alone}, **scales)
    return p.given(config, {"alphas": "weights"}, act_format="nvfp4", **scalars)


@case
def nvfp4__dynamic_swizzled_as_a_matrix() -> Given:
    p, alphas = pair(nvfp4), (positive(EXPERTS, 2) / 16, positive(EXPERTS) / 16)
    tiled = (flat_swizzle(s).unflatten(1, (-(-s.shape[1] // 128) * 128, -1)) for s in p.scales)
    config = moe_config.nvfp4_moe_quant_config(*alphas, None, None, *tiled)
    return p.given(config, act_format="nvfp4", g1_alphas=alphas[0], g2_alphas=alphas[1])


@case
def nvfp4_w4a16() -> Given:
    p, alphas = pair(nvfp4), (positive(EXPERTS) / 16, positive(EXPERTS) / 16)
    config = moe_config.nvfp4_w4a16_moe_quant_config(*alphas, *p.scales)
    return p.stored(lambda c: c.view(torch.float4_e2m1fn_x2)).given(config, g1_alphas=alphas[0], g2_alphas=alphas[1])


@case
def biased() -> Given:
    bias, weights = biases(), (torch.randn(EXPERTS, 2 * INTER, HIDDEN) / 12, torch.randn(EXPERTS, HIDDEN, INTER) / 12)
    layer = emulation.Layer(weights[0].double(), weights[1].double(), **of_layer(bias))
    return Given(moe_config.biased_moe_quant_config(**bias), *weights, layer)


@case
def unquantized() -> Given:
    weights = (torch.randn(EXPERTS, 2 * INTER, HIDDEN) / 12, torch.randn(EXPERTS, HIDDEN, INTER) / 12)
    layer = emulation.Layer(weights[0].double(), weights[1].double())
    return Given(moe_config.FUSED_MOE_UNQUANTIZED_CONFIG, *weights, layer)
