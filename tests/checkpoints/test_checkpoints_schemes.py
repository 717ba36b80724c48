"""Every other format: fixtures and vectors of third-party tools.

Where no tool's file exists, a tool's numbers are put under the names of that format: DeepSeek-V4, Quark,
compressed-tensors blocks, MXFP8, asymmetric int4. Fused FP8 and int8 with zero points have no tool's numbers at all:
there the truth is the numpy arrays that the file is made of.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from checkpoints_support import (
    FIXTURES,
    changed,
    decode,
    e4m3_values,
    expected,
    expected_layers,
    int4_codes,
    stored,
    write,
)
from safetensors.torch import load_file
from torch import Tensor

from torch_moe_ops import dequantize_experts
from torch_moe_ops.checkpoints import CheckpointError, load_experts

ROOT = "model.layers.0.mlp.experts"
VECTORS = FIXTURES.parent / "vectors"
SCHEMES = {
    "gpt_oss_mxfp4": "mxfp4",
    "qwen3_moe_ct_fp8_channel": "fp8",
    "qwen3_moe_ct_int4_g32": "mxint4",
    "qwen3_moe_ct_int8": "int8",
    "qwen3_moe_ct_mxfp4": "mxfp4",
    "qwen3_moe_fp8_block": "fp8_block",
    "qwen3_moe_modelopt_fp8": "fp8",
}
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
CONFIG = {"model_type": "qwen3_moe", "hidden_act": "silu"}


def assert_equals_expected(raw, name, layer=0):
    oracle = expected(name)
    for which in ("w13", "w2"):
        for expert in (0, 1):
            deq = oracle[f"layers.{layer}.{which}_deq_e{expert}"].numpy()
            np.testing.assert_array_equal(decode(raw, which, expert), deq, strict=True)


@pytest.mark.parametrize("name", SCHEMES)
def test_fixture_bit_for_bit(name):
    for layer in expected_layers(name):
        raw = load_experts(FIXTURES / name, layer)
        assert raw.scheme == SCHEMES[name]
        assert_equals_expected(raw, name, layer)
        for which, values in zip(("w13", "w2"), dequantize_experts(raw), strict=True):
            for expert in (0, 1):
                assert torch.equal(values[expert], expected(name)[f"layers.{layer}.{which}_deq_e{expert}"])


def test_all_fixtures_are_covered():
    others = {folder.name for folder in FIXTURES.iterdir() if "nvfp4" not in folder.name}
    assert others == SCHEMES.keys()


def test_gpt_oss_mxfp4_biases():
    raw, oracle = load_experts(FIXTURES / "gpt_oss_mxfp4", 0), expected("gpt_oss_mxfp4")
    for e in (0, 1):
        np.testing.assert_array_equal(raw.w13_bias[e].float().numpy(), oracle[f"layers.0.b13_e{e}"].numpy())
        np.testing.assert_array_equal(raw.w2_bias[e].float().numpy(), oracle[f"layers.0.b2_e{e}"].numpy())
    assert raw.activation == "swigluoai"


@pytest.mark.parametrize(
    ("name", "field", "shape"),
    [
        ("qwen3_moe_modelopt_fp8", "w13_scale", (6, 2)),
        ("qwen3_moe_modelopt_fp8", "w2_scale", (6, 1)),
        ("qwen3_moe_modelopt_fp8", "a13_input_scale", (6,)),
        ("qwen3_moe_ct_fp8_channel", "w13_scale", (8, 96, 1)),
        ("qwen3_moe_ct_fp8_channel", "w2_scale", (8, 80, 1)),
        ("qwen3_moe_fp8_block", "w13_scale", (4, 4, 2)),
        ("qwen3_moe_fp8_block", "w2_scale", (4, 2, 2)),
        ("qwen3_moe_ct_int8", "w13_scale", (8, 112, 1)),
        ("qwen3_moe_ct_int4_g32", "w2_scale", (6, 64, 5)),
    ],
)
def test_scale_shapes(name, field, shape):
    assert tuple(getattr(load_experts(FIXTURES / name, 0), field).shape) == shape


def renamed(name: str, parts: dict[str, str], **conversions) -> dict[str, Tensor]:
    """A fixture's tensors under another format's names; `conversions` change the tensors of a part."""
    tensors = {}
    for key, value in stored(name).items():
        root, _, part = key.rpartition(".")
        if ".experts." in key:
            key = f"{root}.{parts.get(part, part)}"
            value = conversions[part](value) if part in conversions else value
        tensors[key] = value
    return tensors


def test_deepseek_v4_fp4(tmp_path):
    """int8 codes and float8_e8m0fnu scales under layers.<n>.ffn.experts.<e>.w{1,2,3}, clamped silu."""
    name = "qwen3_moe_ct_mxfp4"
    tensors = renamed(
        name,
        {"weight_packed": "weight", "weight_scale": "scale"},
        weight_packed=lambda t: t.view(torch.int8),
        weight_scale=lambda t: t.view(torch.float8_e8m0fnu),
    )
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    experts = {}
    for key, value in tensors.items():
        if ".experts." in key:
            for old, new in names.items():
                key = key.replace(f".{old}.", f".{new}.")
            experts[key.removeprefix("model.").replace(".mlp.", ".ffn.")] = value
    experts.update({key.replace("layers.0.", "mtp.0."): value for key, value in experts.items()})
    config = {"model_type": "deepseek_v4", "hidden_act": "silu", "swiglu_limit": 10.0, "num_hidden_layers": 1}
    folder = write(tmp_path, experts, config)
    raw = load_experts(folder, 0)
    assert (raw.scheme, raw.activation, raw.swiglu_limit) == ("mxfp4", "silu", 10.0)
    assert_equals_expected(raw, name)
    assert_equals_expected(load_experts(folder, 0, mtp=True), name)
    assert len(list(load_experts(folder, None))) == 1 and len(list(load_experts(folder, None, mtp=True))) == 2


def test_quark_mxfp4(tmp_path):
    name = "qwen3_moe_ct_mxfp4"
    raw = load_experts(write(tmp_path, renamed(name, {"weight_packed": "weight"}), CONFIG), 0)
    assert raw.scheme == "mxfp4"
    assert_equals_expected(raw, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compressed_tensors_fp8_blocks(tmp_path, dtype):
    name = "qwen3_moe_fp8_block"
    groups = {"group_0": {"weights": {"strategy": "block", "block_structure": [128, 128], "num_bits": 8}}}
    config = {**CONFIG, "quantization_config": {"config_groups": groups, "quant_method": "compressed-tensors"}}
    tensors = renamed(name, {"weight_scale_inv": "weight_scale"}, weight_scale_inv=lambda t: t.to(dtype))
    raw = load_experts(write(tmp_path, tensors, config), 0)
    assert raw.scheme == "fp8_block" and raw.w13_scale.dtype == torch.float32
    if dtype == torch.float32:
        assert_equals_expected(raw, name)
    else:
        half = torch.stack([tensors[f"{ROOT}.{e}.gate_proj.weight_scale"] for e in range(4)]).float()
        assert torch.equal(raw.w13_scale[:, :2], half)


@pytest.mark.parametrize(("block_size", "scheme"), [([128, 128], "fp8_block"), (None, "fp8")])
def test_one_scale_is_a_tile_only_where_the_config_says_so(tmp_path, block_size, scheme):
    name = "qwen3_moe_modelopt_fp8"
    tensors = renamed(name, {"weight_scale": "weight_scale_inv"}, weight_scale=lambda t: t.reshape(1, 1))
    tensors = {key: t for key, t in tensors.items() if "input_scale" not in key}
    quantization = {"quant_method": "fp8", "weight_block_size": block_size}
    raw = load_experts(write(tmp_path, tensors, {**CONFIG, "quantization_config": quantization}), 0)
    assert raw.scheme == scheme
    assert_equals_expected(raw, name)


def test_other_tiles_are_refused(tmp_path):
    config = {**CONFIG, "quantization_config": {"weight_block_size": [64, 64]}}
    folder = write(tmp_path, stored("qwen3_moe_fp8_block"), config)
    with pytest.raises(CheckpointError, match=r"experts\.0\.gate_proj\.weight_scale_inv .*tiles of 128 x 128"):
        load_experts(folder, 0)


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_fp8_channel_scales_of_either_rank(tmp_path, shape):
    name = "qwen3_moe_ct_fp8_channel"
    tensors = renamed(name, {}, weight_scale=lambda t: t.float().reshape(shape))
    assert_equals_expected(load_experts(write(tmp_path, tensors, CONFIG), 0), name)


def test_fp8_tensor_scale_without_input_scale(tmp_path):
    name = "qwen3_moe_modelopt_fp8"
    tensors = {
        k: t for k, t in renamed(name, {}, weight_scale=lambda t: t.reshape(1)).items() if "input_scale" not in k
    }
    raw = load_experts(write(tmp_path, tensors, CONFIG), 0)
    assert raw.a13_input_scale is None
    assert_equals_expected(raw, name)


@pytest.mark.parametrize("scale_shape", [(), (1,), (4,)])
def test_fused_llama4_fp8(tmp_path, scale_shape):
    """[E, H, 2I] and [E, I, H], gate then up, one scale for all experts or one each."""
    generator = torch.Generator().manual_seed(3)
    codes = torch.randn(4, 48, 64, generator=generator).to(torch.float8_e4m3fn)
    down = torch.randn(4, 32, 48, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.arange(1, 1 + max(1, int(np.prod(scale_shape))), dtype=torch.float32).reshape(scale_shape) / 64
    root = "language_model.model.layers.5.feed_forward.experts"
    tensors = {
        f"{root}.gate_up_proj": codes,
        f"{root}.gate_up_proj_weight_scale": scale,
        f"{root}.gate_up_proj_input_scale": torch.tensor(0.25),
        f"{root}.down_proj": down,
        f"{root}.down_proj_weight_scale": scale * 2,
        f"{root}.down_proj_input_scale": torch.tensor(0.5),
    }
    config = {"model_type": "llama4", "text_config": {"hidden_act": "silu", "num_local_experts": 4}}
    raw = load_experts(write(tmp_path, tensors, config), 5)
    assert (raw.scheme, raw.activation, raw.w13.shape) == ("fp8", "silu", (4, 64, 48))
    for e in range(4):
        one = scale.reshape(-1)[e if scale.numel() == 4 else 0].numpy()
        np.testing.assert_array_equal(decode(raw, "w13", e), e4m3_values(codes[e]).T * one)
        np.testing.assert_array_equal(decode(raw, "w2", e), e4m3_values(down[e]).T * (one * 2))
    assert raw.a13_input_scale.item() == 0.25 and raw.a2_input_scale.item() == 0.5


@pytest.mark.parametrize(("inter", "fits"), [(128, True), (112, False)])
def test_fused_fp8_blocks(tmp_path, inter, fits):
    """[E, 2I, H] with the tiles of gate and up in one grid: only where no tile spans both."""
    generator = torch.Generator().manual_seed(6)
    root = "model.layers.0.mlp.experts"
    w13 = torch.randn(2, 2 * inter, 144, generator=generator).to(torch.float8_e4m3fn)
    w2 = torch.randn(2, 144, inter, generator=generator).to(torch.float8_e4m3fn)
    tensors = {
        f"{root}.gate_up_proj": w13,
        f"{root}.gate_up_proj_scale_inv": torch.rand(2, 2, 2, generator=generator) + 0.5,
        f"{root}.down_proj": w2,
        f"{root}.down_proj_scale_inv": torch.rand(2, 2, 1, generator=generator) + 0.5,
    }
    config = {**CONFIG, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    folder = write(tmp_path, tensors, config)
    if not fits:
        with pytest.raises(CheckpointError, match=r"gate_up_proj .*multiples of 128, else a tile spans both, got 224"):
            load_experts(folder, 0)
        return
    raw = load_experts(folder, 0)
    assert raw.scheme == "fp8_block"
    assert torch.equal(raw.w13.view(torch.uint8), w13.view(torch.uint8))
    assert torch.equal(raw.w13_scale, tensors[f"{root}.gate_up_proj_scale_inv"])
    assert torch.equal(raw.w2_scale, tensors[f"{root}.down_proj_scale_inv"])


def test_deepseek_v4_fp8_tiles_as_exponents(tmp_path):
    """e8m0 scales of 128 x 128 tiles are not those of MXFP8's blocks of 32."""
    name = "qwen3_moe_fp8_block"
    powers = lambda t: torch.full(t.shape, 0.25).to(torch.float8_e8m0fnu)  # noqa: E731
    tensors = renamed(name, {"weight_scale_inv": "scale"}, weight_scale_inv=powers)
    raw = load_experts(write(tmp_path, tensors, CONFIG), 0)
    assert raw.scheme == "fp8_block" and (raw.w13_scale == 0.25).all() and (raw.w2_scale == 0.25).all()


def test_gpt_oss_blocks_are_interleaved_whatever_the_model_is_called(tmp_path):
    name = "gpt_oss_mxfp4"
    raw = load_experts(write(tmp_path, stored(name), {"model_type": "derived_from_it", "hidden_act": "silu"}), 0)
    assert raw.activation == "swigluoai"
    assert_equals_expected(raw, name)


def vector_experts(file: str, parts: dict[str, str], name: str, align: int = 1) -> tuple[dict[str, Tensor], Tensor]:
    """Two experts cut from a tool's 200 x 96 matrix: tensors, and the tool's dequantized rows [2, 3, 96, 96]."""
    vectors = load_file(VECTORS / file)
    tensors, rows = {}, []
    for expert, starts in enumerate(((0, 96, 104), (96, 8, 48))):
        for projection, start in zip(PROJECTIONS, starts, strict=True):
            for part, key in parts.items():
                step = align if part == "weight_zero_point" else 1
                cut = vectors[f"{name}_{key}" if name[-1] != "/" else name + key][start // step : (start + 96) // step]
                tensors[f"{ROOT}.{expert}.{projection}.{part}"] = cut
            dequant = vectors[f"{name}_dequant" if name[-1] != "/" else f"{name}dequant"]
            rows.append(dequant[start : start + 96].float())
    return tensors, torch.stack(rows).reshape(2, 3, 96, 96)


def assert_equals_rows(raw, rows: Tensor):
    for expert in (0, 1):
        np.testing.assert_array_equal(decode(raw, "w13", expert), rows[expert, :2].reshape(192, 96).numpy())
        np.testing.assert_array_equal(decode(raw, "w2", expert), rows[expert, 2].numpy())


@pytest.mark.parametrize("tool", ["modelopt", "ct"])
def test_mxfp8(tmp_path, tool):
    tensors, rows = vector_experts(
        "mxfp8.safetensors", {"weight": "codes", "weight_scale": "scales"}, f"{tool}/main_bf16/"
    )
    raw = load_experts(write(tmp_path, tensors, CONFIG), 0)
    assert raw.scheme == "mxfp8" and raw.w13_scale.dtype == torch.uint8
    assert_equals_rows(raw, rows)


def test_fused_llama4_mxfp8(tmp_path):
    """ModelOpt's codes and scales, fused and transposed as its export of Llama4 does."""
    tensors, rows = vector_experts(
        "mxfp8.safetensors", {"weight": "codes", "weight_scale": "scales"}, "modelopt/main_bf16/"
    )
    fused = {}
    for name, halves in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        for part, suffix in (("weight", ""), ("weight_scale", "_weight_scale")):
            experts = [torch.cat([tensors[f"{ROOT}.{e}.{p}.{part}"] for p in halves]).t() for e in (0, 1)]
            fused[f"{ROOT}.{name}{suffix}"] = torch.stack(experts)
    raw = load_experts(write(tmp_path, fused, {"model_type": "llama4_text", "hidden_act": "silu"}), 0)
    assert raw.scheme == "mxfp8"
    assert_equals_rows(raw, rows)


@pytest.mark.parametrize(("kind", "scheme"), [("sym", "mxint4"), ("asym", "int4")])
def test_compressed_tensors_int4(tmp_path, kind, scheme):
    parts = {"weight_packed": "packed", "weight_scale": "scale"}
    if kind == "asym":
        parts["weight_zero_point"] = "zero_point"
    tensors, rows = vector_experts("int4_g32.safetensors", parts, f"ct/main_bf16/{kind}", align=8)
    raw = load_experts(write(tmp_path, tensors, CONFIG), 0)
    assert raw.scheme == scheme
    assert (raw.w13_zero_point is None) == (kind == "sym")
    assert_equals_rows(raw, rows)


def test_compressed_tensors_int4_zero_points_in_bytes(tmp_path):
    """As int8 per group, and not packed: the same weights."""
    parts = {"weight_packed": "packed", "weight_scale": "scale", "weight_zero_point": "zero_point"}
    tensors, rows = vector_experts("int4_g32.safetensors", parts, "ct/main_bf16/asym", align=8)
    for key, value in tensors.items():
        if key.endswith("weight_zero_point"):
            tensors[key] = torch.from_numpy(int4_codes(value.t()).T.astype(np.int8) - 8)
    assert_equals_rows(load_experts(write(tmp_path, tensors, CONFIG), 0), rows)
    tensors[key] = tensors[key] * 0 + 9
    with pytest.raises(CheckpointError, match=r"weight_zero_point .* must lie in -8\.\.7"):
        load_experts(write(tmp_path, tensors, CONFIG), 0)


@pytest.mark.parametrize("group", [32, 64])
def test_int8_groups_and_zero_points(tmp_path, group):
    generator = np.random.default_rng(4)
    tensors, want = {}, []
    for projection, (n, k) in zip(PROJECTIONS, ((64, 128), (64, 128), (128, 64)), strict=True):
        codes = generator.integers(-128, 128, (n, k)).astype(np.int8)
        scale = generator.random((n, k // group)).astype(np.float32) + 0.5
        zero = generator.integers(-128, 128, (n, k // group)).astype(np.int8)
        for part, value in (("weight", codes), ("weight_scale", scale), ("weight_zero_point", zero)):
            tensors[f"{ROOT}.0.{projection}.{part}"] = torch.from_numpy(value)
        spread = np.repeat(zero.astype(np.float32), group, 1)
        want.append((codes.astype(np.float32) - spread) * np.repeat(scale, group, 1))
    raw = load_experts(write(tmp_path, tensors, CONFIG), 0)
    np.testing.assert_array_equal(decode(raw, "w13", 0), np.concatenate(want[:2]))
    np.testing.assert_array_equal(decode(raw, "w2", 0), want[2])


def test_compressed_tensors_int4_shape_is_checked(tmp_path):
    key = f"{ROOT}.2.up_proj.weight_shape"
    folder = changed(tmp_path, "qwen3_moe_ct_int4_g32", lambda t: t.update({key: torch.tensor([160, 32])}))
    with pytest.raises(CheckpointError, match=rf"{key} \(expert 2, up\) must be \[160, 64\]"):
        load_experts(folder, 0)
