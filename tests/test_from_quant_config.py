"""RawWeights.from_quant_config: every builder's config runs, and means what its tensors say.

Codes are drawn at random, not quantized, and decoded here in float64; the layer is computed by the emulation of the
contract that the C++ kernels are held against, which shares no code with the package.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import cpu_emulation as emulation
import pytest
import torch
from tolerances import bound, relative_l2
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops import config as moe_config
from torch_moe_ops.config import RoutingMethodType

EXPERTS, HIDDEN, INTER = 3, 160, 128
FP8, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


@dataclasses.dataclass
class Given:
    """A config, the weights beside it, and what both mean."""

    config: Any
    w13: Tensor
    w2: Tensor
    layer: emulation.Layer
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def raw(self) -> moe.RawWeights:
        return moe.RawWeights.from_quant_config(self.w13, self.w2, self.config, **self.options)


@dataclasses.dataclass
class Pair:
    """w13 and w2 in one format: stored codes, scales, zero points, and values in float64."""

    codes: tuple[Tensor, Tensor]
    scales: tuple[Tensor, Tensor]
    values: tuple[Tensor, Tensor]
    zeros: tuple[Tensor, Tensor]

    def given(self, config: Any, options: dict[str, Any] | None = None, **layer: Any) -> Given:
        return Given(config, *self.codes, emulation.Layer(*self.values, **layer), options or {})

    def stored(self, change: Callable[[Tensor], Tensor]) -> Pair:
        return dataclasses.replace(self, codes=(change(self.codes[0]), change(self.codes[1])))


def pair(make: Callable[[int, int], tuple[Tensor, ...]]) -> Pair:
    """make: (rows, K) -> codes, scale, values (and zero points), the halves of w13 and w2 one by one."""
    first, second = make(2 * INTER, HIDDEN), make(HIDDEN, INTER)
    both = tuple(zip(first, second, strict=True))
    return Pair(both[0], both[1], both[2], both[3] if len(both) > 3 else both[1])


def scaled(values: Tensor, scale: Tensor, group: int) -> Tensor:
    return values.double() * scale.double().repeat_interleave(group, 2)


def positive(*shape: int) -> Tensor:
    return torch.rand(shape) + 0.5


def nvfp4(rows: int, k: int) -> tuple[Tensor, ...]:
    codes = torch.randint(256, (EXPERTS, rows, k // 2), dtype=torch.uint8)
    scale = positive(EXPERTS, rows, k // 16).to(FP8)
    return codes, scale, scaled(emulation.decode_e2m1(codes), scale.float(), 16)


def exponents(rows: int, k: int) -> tuple[Tensor, Tensor]:
    byte = torch.randint(120, 124, (EXPERTS, rows, k // 32), dtype=torch.uint8)
    return byte, torch.exp2(byte.double() - 127)


def mxfp4(rows: int, k: int) -> tuple[Tensor, ...]:
    codes, (byte, factor) = torch.randint(256, (EXPERTS, rows, k // 2), dtype=torch.uint8), exponents(rows, k)
    return codes, byte, scaled(emulation.decode_e2m1(codes), factor, 32)


def mxfp8(rows: int, k: int) -> tuple[Tensor, ...]:
    codes, (byte, factor) = torch.randn(EXPERTS, rows, k).to(FP8), exponents(rows, k)
    return codes, byte, scaled(codes.float(), factor, 32)


def mxfp6(element: str) -> Callable[[int, int], tuple[Tensor, ...]]:
    table = torch.tensor(emulation.MX_ELEMENTS[f"mxfp6_{element}"][1])

    def make(rows: int, k: int) -> tuple[Tensor, ...]:
        codes, (byte, factor) = torch.randint(64, (EXPERTS, rows, k), dtype=torch.uint8), exponents(rows, k)
        values = torch.where(codes >= 32, -table[(codes & 31).long()], table[(codes & 31).long()])
        return codes, byte, scaled(values / table.max() * 6, factor, 32) * (table.max() / 6)

    return make


def fp8(per: str) -> Callable[[int, int], tuple[Tensor, ...]]:
    """per: "tensor", "half", "channel" or "block"."""

    def make(rows: int, k: int) -> tuple[Tensor, ...]:
        codes = torch.randn(EXPERTS, rows, k).to(FP8)
        if per == "block":
            scale = positive(EXPERTS, -(-rows // 128), -(-k // 128)) / 8
            factor = scale.repeat_interleave(128, 1)[:, :rows].repeat_interleave(128, 2)[:, :, :k]
        else:
            count = {"half": rows // INTER if rows > HIDDEN else 1, "channel": rows}.get(per, 1)
            scale = positive(EXPERTS, count) / 8
            factor = scale.repeat_interleave(rows // count, 1)[:, :, None]
            scale = scale[:, 0] if count == 1 else scale
        return codes, scale, codes.double() * factor.double()

    return make


def integers(
    bits: int, group: int, zero: bool = False, scale_dtype: torch.dtype = torch.float32
) -> Callable[[int, int], tuple[Tensor, ...]]:
    """Codes and zero points 0 .. 2^bits - 1, one int32 each."""
    largest = 2**bits - 1

    def make(rows: int, k: int) -> tuple[Tensor, ...]:
        size = k if group == -1 else group
        codes = torch.randint(largest + 1, (EXPERTS, rows, k), dtype=torch.int32)
        scale = (positive(EXPERTS, rows, k // size) / (2 * largest)).to(scale_dtype)
        center = torch.full(scale.shape, (largest + 1) // 2, dtype=torch.int32)
        if zero:
            center = torch.randint(largest // 3, 2 * largest // 3, scale.shape, dtype=torch.int32)
        return codes, scale, scaled(codes - center.repeat_interleave(size, 2), scale.float(), size), center

    return make


def two_a_byte(codes: Tensor) -> Tensor:
    even, odd = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return (even | odd << 4).to(torch.uint8)


def in_words(codes: Tensor, bits: int = 4) -> Tensor:
    """int32, element 0 in the lowest bits."""
    shifted = codes.long().unflatten(-1, (-1, 32 // bits)) << torch.arange(0, 32, bits)
    return shifted.sum(-1).to(torch.int32)


def along_rows(pack: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda zeros: pack(zeros.transpose(1, 2)).transpose(1, 2).contiguous()


def biases() -> dict[str, Tensor]:
    return {"w1_bias": torch.randn(EXPERTS, 2 * INTER) / 4, "w2_bias": torch.randn(EXPERTS, HIDDEN) / 4}


def of_layer(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"w13_bias": given["w1_bias"], "w2_bias": given["w2_bias"]}


def kernel_scalars(per_half: bool, per_expert: bool, experts: int = EXPERTS) -> dict[str, Tensor]:
    """What a kernel of the field is given: gscales, and alphas that contain the input scales."""
    shape = (experts,) if per_expert else ()
    a13, a2 = positive(*shape) * 4 / 2688, positive(*shape) * 9 / 2688
    s13 = positive(experts, 2) if per_half else positive(experts)
    g1 = (a13[:, None] if per_half and per_expert else a13) * s13 / 16
    return {"g1_alphas": g1, "g2_alphas": a2 * positive(experts) / 16, "a1_gscale": 1 / a13, "a2_gscale": 1 / a2}


def flat_swizzle(scale: Tensor) -> Tensor:
    """The 128x4 layout written out element by element of its definition."""
    experts, rows, cols = scale.shape
    tiles = -(-cols // 4)
    out = torch.zeros(experts, -(-rows // 128) * 128 * tiles * 4, dtype=torch.uint8)
    m, c = torch.arange(rows)[:, None], torch.arange(cols)[None]
    offset = ((m // 128 * tiles + c // 4) * 32 + m % 32) * 16 + m % 128 // 32 * 4 + c % 4
    out[:, offset] = scale.view(torch.uint8)
    return out.view(scale.dtype)


# -- one entry per builder and way of using it -------------------------------------------------------------------------

CASES: dict[str, Callable[[], Given]] = {}


def case(function: Callable[[], Given]) -> Callable[[], Given]:
    CASES[function.__name__] = function
    return function


@case
def fp8_w8a8__static_tensor() -> Given:
    p, a = pair(fp8("tensor")), (torch.tensor([0.01]), torch.tensor(0.02))
    config = moe_config.fp8_w8a8_moe_quant_config(*p.scales, *a)
    factors = {f"g{i + 1}_alphas": s.expand(EXPERTS) for i, s in enumerate(a)}
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
    scalars = {"g1_alphas": a13, "g2_alphas": a2, "a1_gscale": 1 / a13, "a2_gscale": 1 / a2}
    return p.given(config, act_format="fp8", **scalars, **of_layer(bias))


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
    scalars = {"g1_alphas": a[0].expand(EXPERTS), "g2_alphas": a[1], "a1_gscale": 1 / a[0], "a2_gscale": 1 / a[1]}
    return Given(config, codes[0], codes[1], emulation.Layer(values[0], values[1], act_format="int8", **scalars))


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
    gated = {"activation": "swigluoai", "constants": (1.5, 0.75, 2.0)}
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
    factors = {f"g{i + 1}_alphas": s.expand(EXPERTS) for i, s in enumerate(a)}
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
    return p.given(config, act_format="nvfp4", **scalars, **of_layer(bias))


@case
def nvfp4__static_expert_halves() -> Given:
    p, scalars = pair(nvfp4), kernel_scalars(True, True)
    scales = dict(zip(("w1_scale", "w2_scale"), p.scales, strict=True))
    config = moe_config.nvfp4_moe_quant_config(**scalars, **scales, is_nvfp4_scale_swizzled=False)
    return p.given(config, act_format="nvfp4", **scalars)


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
    w = moe.prepare(moe.RawWeights.from_quant_config(*codes, config), act_format="nvfp4", backend="reference")
    assert torch.equal(w.a1_gscale, scalars["a1_gscale"]) and torch.equal(w.a2_gscale, scalars["a2_gscale"])
    for name in ("g1_alphas", "g2_alphas"):
        got, want = getattr(w, name), scalars[name]
        # The product is not onto: a few alphas have no float32 scale_2 that gives them.
        assert (got == want).double().mean() > 0.75
        assert ((got - want).abs() <= torch.finfo(torch.float32).eps * want).all()


def test_weight_only_alphas_are_the_weights_own() -> None:
    given = CASES["nvfp4_w4a16"]()
    raw = given.raw()
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
    "scale shape": (
        lambda: reconfigured(
            "fp8_w8a16__channel", lambda g: moe_config.fp8_w8a16_moe_quant_config(*(torch.ones(EXPERTS, 5, 7),) * 2)
        ),
        r"w2_scale must hold one scale, one per half or one per row \(of 160\) of each expert, got \(3, 5, 7\)",
    ),
    "weight dtype": (lambda: changed("mxfp4_moe", w2=torch.zeros(3, 160, 64)), "w2 must have dtype torch.uint8"),
    "swizzled size": (
        lambda: changed("nvfp4__static_tensor_swizzled", w2=torch.zeros(EXPERTS, 400, 64, dtype=torch.uint8)),
        "w2_scale must hold 512 x 8 swizzled scales per expert for 400 rows of 8 blocks",
    ),
    "fp8 blocks": (
        lambda: reconfigured(
            "fp8_w8a8__block",
            lambda g: moe_config.fp8_w8a8_moe_quant_config(*(torch.ones(EXPERTS, 4, 4),) * 2, block_shape=[64, 64]),
        ),
        r"block_shape must be \[128, 128\], got \[64, 64\]",
    ),
    "activation blocks": (
        lambda: reconfigured(
            "mxfp4_w4a8__dynamic",
            lambda g: moe_config.mxfp4_w4a8_moe_quant_config(
                g.config.w1_scale.view(torch.uint8), g.config.w2_scale.view(torch.uint8), block_shape=[1, 128]
            ),
        ),
        r"block_shape must be None for fp8 activations with mxfp4 weights, .*, got \[1, 128\]",
    ),
    "token scales": (
        lambda: reconfigured(
            "fp8_w8a8__channel_token",
            lambda g: moe_config.fp8_w8a8_moe_quant_config(
                g.config.w1_scale,
                g.config.w2_scale,
                torch.ones(7, 1),
                torch.ones(14, 1),
                per_act_token_quant=True,
                per_out_ch_quant=True,
            ),
        ),
        r"a2_scale must hold one scale, or one per expert \(scales of tokens go with the call",
    ),
    "static scale of a dynamic format": (
        lambda: reconfigured(
            "fp8_w8a8__block",
            lambda g: moe_config.fp8_w8a8_moe_quant_config(
                g.config.w1_scale,
                g.config.w2_scale,
                block_shape=[128, 128],
                a1_gscale=torch.ones(()),
                a2_gscale=torch.ones(()),
            ),
        ),
        "a2_gscale must be None: fp8 activations with fp8_block weights have dynamic scales",
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
        r"g1_alphas must be w1_scale \(times the input scale, with a1_gscale\), got 'other values'",
    ),
    "group": (
        lambda: reconfigured(
            "gptq_marlin__int4",
            lambda g: moe_config.gptq_marlin_moe_quant_config(g.config.w1_scale, g.config.w2_scale, 4, 64),
        ),
        "w2_scale must hold a scale per 64 of K = 128",
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
    "zero point dtype": (
        lambda: reconfigured(
            "gptq_marlin__int4",
            lambda g: moe_config.gptq_marlin_moe_quant_config(
                g.config.w1_scale, g.config.w2_scale, 4, 32, g.config.w1_scale, g.config.w2_scale
            ),
        ),
        "w2_zp must have an integer dtype, got torch.float16",
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
    with pytest.raises(TypeError, match="w1_scale must be a Tensor: .*, got PrecisionConfig"):
        moe.RawWeights.from_quant_config(given.w13, given.w2, config)


# -- explain(config=, quant_config=) -----------------------------------------------------------------------------------


def layer_config(**changes: Any) -> Any:
    """The layer of the cases above, as rank 1 of 2 of twice as many experts."""
    parallel = moe_config.FusedMoEParallelConfig.make(2, 1, 1, 1, enable_expert_parallel=True, tp_rank=1)
    fields: dict[str, Any] = {
        "num_experts": 2 * EXPERTS,
        "experts_per_token": 2,
        "hidden_dim": HIDDEN,
        "intermediate_size_per_partition": INTER,
        "num_local_experts": EXPERTS,
        "num_logical_experts": 2 * EXPERTS,
        "activation": "silu",
        "device": "cpu",
        "routing_method": RoutingMethodType.DeepSeekV3,
        "moe_parallel_config": parallel,
        "in_dtype": torch.bfloat16,
    }
    return moe_config.FusedMoEConfig(**{**fields, **changes})


@pytest.mark.parametrize("name", [n for n in CASES if n != "unquantized"])
def test_explain_takes_configs(name: str) -> None:
    """The configs pose the problem that the weights made from them pose; top_k, routing and dtype are known besides."""
    given = CASES[name]()
    gated = given.layer.activation
    config = layer_config(activation=gated, has_bias=given.config.w1_bias is not None)
    found = moe.explain(config=config, quant_config=given.config)
    placed = {"num_experts": 2 * EXPERTS, "local_expert_offset": EXPERTS}
    raw = dataclasses.replace(given.raw(), activation=gated)
    of_raw = moe.explain(raw, act_format=given.config.act_format, **placed)
    known = {"top_k": 2, "routing_method": "deepseek_v3", "dtype": torch.bfloat16}
    assert found.problem == dataclasses.replace(of_raw.problem, **known)
    assert found.chosen == of_raw.chosen and found.against == of_raw.against


def test_explain_takes_the_backend_and_the_device_of_the_config() -> None:
    config = layer_config(device="cuda", moe_backend="reference", routing_method=RoutingMethodType.Llama4)
    found = moe.explain(config=config, capability=(9, 0))
    assert (found.requested, found.problem.device, found.problem.capability) == ("reference", "cuda", (9, 0))
    assert found.problem.scheme == "none" and found.problem.router_weight_on_input
    assert moe.explain(config=config, backend="cpu").requested == "cpu"


def test_explain_refuses_configs_that_contradict_each_other() -> None:
    given = CASES["nvfp4_w4a16"]()
    with pytest.raises(ValueError, match="w1_scale must have shape"):
        moe.explain(config=layer_config(hidden_dim=64), quant_config=given.config)
    for arguments in ({"quant_config": given.config}, {"what": given.raw(), "config": layer_config()}):
        with pytest.raises(TypeError, match="config must be given instead of what"):
            moe.explain(**arguments)
