"""Every config that is accepted runs, or is refused when it is made: all flags, blocks and kinds of scales crossed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from config_samples import build, scales, static
from quant_config_weights import (
    EXPERTS,
    FP8,
    HIDDEN,
    INTER,
    fp8,
    in_words,
    integers,
    mxfp4,
    mxfp6,
    mxfp8,
    nvfp4,
    pair,
    positive,
)
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.config import FusedMoEQuantConfig, FusedMoEQuantDesc, GroupShape
from torch_moe_ops.config.formats import FORMATS
from torch_moe_ops.core.schemes import SCHEMES

ROWS = (2 * INTER, HIDDEN)
BLOCKS = (None, [1, 16], [1, 32], [0, 32], [1, 48], [1, -1], [-1, -1], [-1, 1], [1, 128], [64, 64], [128, 128])
STATIC: dict[str, dict[str, Tensor]] = {
    "dynamic": {},
    "scale": {"a1_scale": torch.tensor(0.02), "a2_scale": torch.tensor([0.03])},
    "scale of experts": {"a1_scale": positive(EXPERTS) / 50, "a2_scale": positive(EXPERTS) / 40},
    "gscale": {"a1_gscale": torch.tensor(50.0), "a2_gscale": torch.tensor(40.0)},
    "scale of tokens": {"a1_scale": torch.ones(5, 1), "a2_scale": torch.ones(10, 1)},
}


def weights_of(dtype: Any) -> dict[str, tuple[Any, list[Tensor], list[Tensor] | None]]:
    """Codes, scales and zero points by what shares a scale."""
    if dtype is None:
        plain = torch.randn(EXPERTS, 2 * INTER, HIDDEN), torch.randn(EXPERTS, HIDDEN, INTER)
        return {"none": (plain, [], None)}
    if dtype in ("int4", torch.int8):
        bits, made = (4 if dtype == "int4" else 8), {}
        for name, group in (("group", 32), ("row", -1)):
            p = pair(integers(bits, group, zero=True))
            codes = p.stored(in_words if bits == 4 else lambda c: c.to(torch.uint8)).codes
            made[name] = (codes, list(p.scales), [z.to(torch.uint8) for z in p.zeros])
        codes, found, _ = made["row"]
        made["row without K"] = (codes, [s[..., 0] for s in found], None)
        if bits == 8:
            made["expert"] = (codes, [positive(EXPERTS) / 500 for _ in found], None)
        return made
    if dtype == FP8:
        kinds = {"expert": "tensor", "half": "half", "row": "channel", "tile": "block"}
        pairs = {name: pair(fp8(kind)) for name, kind in kinds.items()}
        return {name: (p.codes, list(p.scales), None) for name, p in pairs.items()}
    makers = {"nvfp4": nvfp4, "mxfp4": mxfp4, "mxfp8": mxfp8, "mxfp6_e3m2": mxfp6("e3m2"), "mxfp6_e2m3": mxfp6("e2m3")}
    p = pair(makers[dtype])
    return {"block": (p.codes, list(p.scales), None)}


def alphas_of(weight: Any, found: list[Tensor]) -> Iterator[dict[str, Tensor]]:
    yield {}
    if weight == FP8 and found[0].numel() <= 2 * EXPERTS:
        yield {"g1_alphas": found[0].clone(), "g2_alphas": found[1].clone()}
    elif weight == "int4":
        yield {"g1_alphas": positive(EXPERTS, ROWS[0]), "g2_alphas": positive(EXPERTS, ROWS[1], 1)}
        yield {"g1_alphas": positive(EXPERTS), "g2_alphas": positive(EXPERTS)}
    else:
        yield {"g1_alphas": positive(EXPERTS), "g2_alphas": positive(EXPERTS)}


def arguments_of(weight: Any, found: list[Tensor], zeros: list[Tensor] | None) -> Iterator[dict[str, Any]]:
    given: dict[str, Any] = dict(zip(("w1_scale", "w2_scale"), found, strict=False))
    points: list[dict[str, Any]] = [{}] if zeros is None else [{}, {"w1_zp": zeros[0], "w2_zp": zeros[1]}]
    for act, token, channel, block, name, zp, alphas in itertools.product(
        FORMATS, (False, True), (False, True), BLOCKS, STATIC, points, alphas_of(weight, found)
    ):
        flags = {"per_act_token_quant": token, "per_out_ch_quant": channel, "block_shape": block}
        yield {"quant_dtype": act, "weight_dtype": weight, **flags, **given, **STATIC[name], **zp, **alphas}


def run(config: FusedMoEQuantConfig, w13: Tensor, w2: Tensor) -> Tensor:
    has_input_scale = config.a1_scale is not None or config.a1_gscale is not None
    said = {"alphas": "weights" if has_input_scale or config._w1.alpha is not None else None}
    raw = moe.RawWeights.from_quant_config(w13, w2, config, **said)
    w = moe.prepare(raw, act_format=config.act_format, backend="reference")
    ids, weights = torch.tensor([[0], [2]], dtype=torch.int32), torch.ones(2, 1)
    return moe.fused_moe_routed(torch.randn(2, HIDDEN), ids, weights, w)


@pytest.mark.parametrize("weight", FORMATS, ids=str)
def test_every_config_that_is_accepted_runs(weight: Any) -> None:
    torch.manual_seed(0)
    accepted, refused, seen = 0, 0, set()
    for kind, (codes, found, zeros) in weights_of(weight).items():
        for arguments in arguments_of(weight, found, zeros):
            # Without a dtype of its own the weight has that of the activations: another weight's turn.
            if weight is None and arguments["quant_dtype"] is not None:
                continue
            try:
                config = FusedMoEQuantConfig.make(**arguments)
            except (ValueError, TypeError):
                refused += 1
                continue
            accepted += 1
            shown = {k: v for k, v in arguments.items() if not isinstance(v, Tensor)}
            given = [k for k, v in arguments.items() if isinstance(v, Tensor)]
            try:
                assert run(config, *codes).isfinite().all()
            except Exception as error:
                raise AssertionError(f"accepted, but does not run: {kind}, {shown}, {given}: {error}") from error
            seen.add(config.act_format)
    assert accepted >= 1 and refused >= 1
    formats = {None: {"none"}}.get(weight) or set(SCHEMES[config_scheme(weight)].act_formats)
    assert seen == formats


def config_scheme(weight: Any) -> str:
    return weight if weight in SCHEMES else FORMATS[weight].scheme


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "int4_w4afp8",
        {"block_shape": [1, 128], "per_act_token_quant": False, "per_out_ch_quant": False},
        "per_act_token_quant must be True where block_shape is given",
    ),
    ("mxfp4_w4a8", {"block_shape": [1, 128]}, "block_shape must be [1, 32] or None for mxfp4, got [1, 128]"),
    ("fp8_w8a8", {"block_shape": [1, -1]}, "block_shape must hold two sizes of at least 1 for torch.float8_e4m3fn"),
    ("fp8_w8a8", {**scales(64, 64), "block_shape": [64, 64]}, "block_shape must be [128, 128] or None for weights of"),
    ("fp8_w8a16", {**scales(1, 32), "block_shape": [1, 32]}, "block_shape must be [128, 128] or None for weights of"),
    ("int8_w8a16", {"block_shape": [1, 48]}, "block_shape must be [1, 32] or [1, 64] or [1, 128] or [1, -1] for wei"),
    ("gptq_marlin", {"group_size": 64}, "w1_scale must hold a scale per 64 of K like w2_scale (3, 64, 3)"),
    ("int4_w4a16", {"block_shape": [32, 32]}, "block_shape must be [1, 32] or [1, 64] or [1, 128] or [1, -1] for wei"),
    ("fp8_w8a8", {"block_shape": [128, 128, 1]}, "block_shape must have two elements, [rows, columns], got [128, 128"),
    (
        "fp8_w8a8",
        {**scales(128, 128), **dict.fromkeys(("a1_scale", "a2_scale", "g1_alphas", "g2_alphas"))}
        | {"block_shape": [128, 128], "a1_gscale": torch.ones(()), "a2_gscale": torch.ones(())},
        "a1_gscale must be None: fp8 activations with fp8_block weights have dynamic scales",
    ),
    (
        "fp8_w8a8",
        {"w1_scale": torch.ones(3, 192), "w2_scale": torch.ones(3, 64), "per_out_ch_quant": True},
        "g1_alphas must be None for fp8 weights with a scale per output channel or block",
    ),
    ("fp8_w8a16", {"w1_scale": torch.ones(3, 3, 1)}, "w1_scale must have 1 tiles along K and 1 or 2 along rows for"),
    (
        "fp8_w8a16",
        {"w1_scale": torch.ones(3, 5, 7), "w2_scale": torch.ones(3, 5, 7), "block_shape": None},
        "w1_scale must hold one scale, one per half or one per row of each expert, got (3, 5, 7)",
    ),
    (
        "gptq_marlin",
        {f"w{i}_zp": torch.zeros(3, n, k // 32, dtype=torch.float16) for i, n, k in ((1, 192, 64), (2, 64, 96))},
        "w1_zp must have a dtype of ['torch.uint8', 'torch.int8', 'torch.int32'], got torch.float16",
    ),
]


@pytest.mark.parametrize(("name", "changes", "text"), REFUSED)
def test_what_cannot_run_is_refused_when_it_is_made(name: str, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        build(f"{name}_moe_quant_config", **changes)
    assert text in str(caught.value)


def test_descriptors_are_held_to_the_same_rules() -> None:
    none, tile = FusedMoEQuantDesc(), FusedMoEQuantDesc(FP8, GroupShape(128, 128))
    row = FusedMoEQuantDesc(FP8, GroupShape(1, 128))
    assert FusedMoEQuantConfig(row, row, tile, tile).scale_shape(3, 300) == (3, 3)
    token = FusedMoEQuantDesc(FP8, GroupShape.PER_TOKEN)
    with pytest.raises(ValueError, match="block_shape must give fp8 activations a scale per token and 128 of K"):
        FusedMoEQuantConfig(token, token, tile, tile)
    int4, mxfp4_weight = FusedMoEQuantDesc("int4", GroupShape(1, 32)), FusedMoEQuantDesc("mxfp4")
    for weight in (int4, mxfp4_weight):
        with pytest.raises(ValueError, match="block_shape must give fp8 activations one scale, or one per token"):
            FusedMoEQuantConfig(row, row, weight, weight)
    with pytest.raises(ValueError, match=r"block_shape must be \[128, 128\] or None for weights"):
        FusedMoEQuantConfig(none, none, row, row)


def test_a_block_of_int4_weights_is_theirs_alone_where_activations_are_per_token() -> None:
    config = build("int4_w4afp8_moe_quant_config", block_shape=[1, 32], per_act_token_quant=True)
    assert config._w1.shape == (1, 32) and config.scale_shape(7, 256) == (7, 1) and config.block_shape == [1, 32]
    assert build("mxfp4_w4a8_moe_quant_config", **static()).block_shape == [1, 32]
