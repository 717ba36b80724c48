"""What a config does not say is said by the caller: what its alphas are, how its weight scales lie. Nothing is guessed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from quant_config_cases import CASES
from quant_config_weights import EXPERTS, FP8, flat_swizzle, positive

import torch_moe_ops as moe
from torch_moe_ops import config as moe_config

HIDDEN, INTER = 256, 128  # whole 128x4 tiles of nvfp4 and mxfp4 scales: the layouts differ in nothing but order
from_quant_config = moe.RawWeights.from_quant_config


def nvfp4_parts() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    shapes = ((2 * INTER, HIDDEN), (HIDDEN, INTER))
    codes = [torch.randint(256, (EXPERTS, n, k // 2), dtype=torch.uint8) for n, k in shapes]
    return codes, [positive(EXPERTS, n, k // 16).to(FP8) for n, k in shapes]


def as_tiles(scale: torch.Tensor) -> torch.Tensor:
    return flat_swizzle(scale).view(scale.shape)


def nvfp4_config(scales: list[torch.Tensor], static: bool = True, **changes: Any) -> Any:
    gscales = (positive() * 60, positive() * 90) if static else (None, None)
    build: Any = moe_config.nvfp4_moe_quant_config
    return build(positive(EXPERTS) / 16, positive(EXPERTS) / 16, *gscales, *scales, **changes)


def test_alphas_beside_a_gscale_are_ambiguous() -> None:
    codes, scales = nvfp4_parts()
    with pytest.raises(ValueError) as caught:
        from_quant_config(*codes, nvfp4_config(scales), weight_scale_layout="linear")
    message = str(caught.value)
    assert message.startswith("from_quant_config: alphas must be 'products' (") and "'weights' (" in message


def test_both_readings_of_alphas() -> None:
    codes, scales = nvfp4_parts()
    config = nvfp4_config(scales)
    alone: Any = from_quant_config(*codes, config, alphas="weights", weight_scale_layout="linear")
    assert torch.equal(alone.w13_scale_2[:, 0], config.g1_alphas) and torch.equal(alone.w2_scale_2, config.g2_alphas)
    products: Any = from_quant_config(*codes, config, alphas="products", weight_scale_layout="linear")
    assert torch.allclose(products.w2_scale_2, config.g2_alphas * config.a2_gscale)
    assert torch.allclose(products.w13_scale_2[:, 0], config.g1_alphas * config.a1_gscale)


@pytest.mark.parametrize("alphas", [None, "weights"])
def test_alphas_without_an_input_scale_are_the_weights(alphas: str | None) -> None:
    codes, scales = nvfp4_parts()
    config = nvfp4_config(scales, static=False)
    raw = from_quant_config(*codes, config, alphas=alphas, weight_scale_layout="linear")
    assert raw.w2_scale_2 is not None and torch.equal(raw.w2_scale_2, config.g2_alphas)
    with pytest.raises(ValueError, match="alphas must be 'weights' or None: the config has no input scale"):
        from_quant_config(*codes, config, alphas="products", weight_scale_layout="linear")


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("layout", ["linear", "swizzled"])
def test_weight_scales_lie_as_the_caller_says_whatever_the_activations_do(layout: str, flag: bool) -> None:
    codes, scales = nvfp4_parts()
    given = [as_tiles(s) for s in scales] if layout == "swizzled" else scales
    config = nvfp4_config(given, static=False, is_nvfp4_scale_swizzled=flag)
    said = dataclasses.replace(config, scale_layout=layout)
    for raw in (
        from_quant_config(*codes, config, weight_scale_layout=layout),
        from_quant_config(*codes, said),
        from_quant_config(*codes, said, weight_scale_layout=layout),
    ):
        assert raw.w13_scale is not None and torch.equal(raw.w13_scale.view(torch.uint8), scales[0].view(torch.uint8))
        assert raw.w2_scale is not None and torch.equal(raw.w2_scale.view(torch.uint8), scales[1].view(torch.uint8))
    with pytest.raises(ValueError) as caught:
        from_quant_config(*codes, config)
    message = str(caught.value)
    assert "weight_scale_layout must be 'linear' (" in message and "or 'swizzled' (" in message
    other = "linear" if layout == "swizzled" else "swizzled"
    with pytest.raises(ValueError, match=f"weight_scale_layout must be '{layout}' like the config's scale_layout"):
        from_quant_config(*codes, said, weight_scale_layout=other)


def test_a_flat_scale_is_swizzled_and_nobody_needs_to_say_so() -> None:
    codes, scales = nvfp4_parts()
    config = nvfp4_config([flat_swizzle(s) for s in scales], static=False, is_nvfp4_scale_swizzled=False)
    raw = from_quant_config(*codes, config)
    assert raw.w13_scale is not None and torch.equal(raw.w13_scale.view(torch.uint8), scales[0].view(torch.uint8))


def test_mx_scales_are_ambiguous_alike() -> None:
    codes = [torch.zeros(EXPERTS, n, k // 2, dtype=torch.uint8) for n, k in ((256, 256), (256, 128))]
    scales = [torch.randint(120, 124, (EXPERTS, n, k // 32), dtype=torch.uint8) for n, k in ((256, 256), (256, 128))]
    config = moe_config.mxfp4_moe_quant_config(*(as_tiles(s) for s in scales))
    with pytest.raises(ValueError, match=r"weight_scale_layout must be 'linear' .* or 'swizzled'"):
        from_quant_config(codes[0], codes[1], config)
    raw = from_quant_config(codes[0], codes[1], config, weight_scale_layout="swizzled")
    assert raw.w13_scale is not None and torch.equal(raw.w13_scale, scales[0])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"alphas": "product"}, "alphas must be 'products', 'weights' or None, got 'product'"),
        ({"weight_scale_layout": "tiles"}, "weight_scale_layout must be 'linear', 'swizzled' or None, got 'tiles'"),
        ({"weight_scale_layout": "swizzled"}, "weight_scale_layout must be 'linear' or None for weights of dtype None"),
    ],
)
def test_readings_that_do_not_exist(arguments: dict[str, Any], text: str) -> None:
    given = CASES["biased"]()
    with pytest.raises(ValueError) as caught:
        from_quant_config(given.w13, given.w2, given.config, **arguments)
    assert text in str(caught.value)


@pytest.mark.parametrize("reading", [None, "products", "weights"])
def test_fp8_alphas_must_be_what_they_are_said_to_be(reading: str | None) -> None:
    """fp8's weight scales tell what the alphas are; a wrong word about them is an error."""
    given = CASES["fp8_w8a8__static_scales_with_products"]()
    if reading == "weights":
        with pytest.raises(ValueError, match="g2_alphas must be w2_scale, got 'other values'"):
            from_quant_config(given.w13, given.w2, given.config, alphas=reading)
        return
    raw = from_quant_config(given.w13, given.w2, given.config, alphas=reading)
    assert raw.w2_scale is not None and torch.equal(raw.w2_scale[:, 0], given.config.w2_scale)
    assert raw.a2_input_scale is not None and raw.a2_input_scale == given.config.a2_scale


def test_the_builder_and_make_say_the_same_of_weights_alone() -> None:
    _, scales = nvfp4_parts()
    alphas = positive(EXPERTS), positive(EXPERTS)
    built = moe_config.nvfp4_w4a16_moe_quant_config(*alphas, *scales)
    factors = {"g1_alphas": alphas[0], "g2_alphas": alphas[1], "w1_scale": scales[0], "w2_scale": scales[1]}
    made = moe_config.FusedMoEQuantConfig.make(None, weight_dtype="nvfp4", **factors)
    assert made == built and made.scale_layout is None and made.is_scale_swizzled == built.is_scale_swizzled
