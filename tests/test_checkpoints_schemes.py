"""Every other format: fixtures and vectors of third-party tools, or files written here by another encoder.

Where no tool's file exists, a tool's numbers are put under the names of that format (DeepSeek-V4, compressed-tensors
blocks, MXFP8, asymmetric int4); only GPTQ and AWQ are encoded here, in numpy, from the formats' definitions.
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
    needs_all_schemes,
    stored,
    write,
)
from safetensors.torch import load_file
from torch import Tensor

from torch_moe_ops.checkpoints import CheckpointError, load_experts

pytestmark = needs_all_schemes

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


@pytest.mark.parametrize("group", [28, 56])
def test_int8_groups_and_zero_points(tmp_path, group):
    generator = np.random.default_rng(4)
    tensors, want = {}, []
    for projection, (n, k) in zip(PROJECTIONS, ((56, 112), (56, 112), (112, 56)), strict=True):
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


class TestGptqAwq:
    """numpy encoders of the two formats; the truth is the codes, zeros and scales they start from."""

    HIDDEN, INTER, EXPERTS, GROUP = 64, 48, 3, 16

    def problem(self, symmetric: bool) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        rng = np.random.default_rng(11)
        made = {}
        for e in range(self.EXPERTS):
            for p in PROJECTIONS:
                n, k = (self.HIDDEN, self.INTER) if p == "down_proj" else (self.INTER, self.HIDDEN)
                codes = rng.integers(0, 16, (n, k))
                zeros = np.full((n, k // self.GROUP), 8) if symmetric else rng.integers(0, 16, (n, k // self.GROUP))
                scales = (rng.random((n, k // self.GROUP)) + 0.5).astype(np.float16)
                made[f"{ROOT}.{e}.{p}"] = codes, zeros, scales
        return made

    @staticmethod
    def words(codes: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
        """[n, 8m] -> int32 [n, m]; nibble i of a word is column order[i] of its eight."""
        out = np.zeros((codes.shape[0], codes.shape[1] // 8), dtype=np.uint32)
        for nibble, column in enumerate(order):
            out |= codes[:, column::8].astype(np.uint32) << np.uint32(4 * nibble)
        return out.view(np.int32)

    def gptq(self, problem, *, version: int, g_idx: bool) -> dict[str, Tensor]:
        tensors = {}
        straight = tuple(range(8))
        for root, (codes, zeros, scales) in problem.items():
            stored_zeros = zeros.T if version == 2 else (zeros.T - 1) % 16
            tensors[f"{root}.qweight"] = torch.from_numpy(self.words(codes, straight).T.copy())
            tensors[f"{root}.qzeros"] = torch.from_numpy(self.words(stored_zeros, straight))
            tensors[f"{root}.scales"] = torch.from_numpy(scales.T.copy())
            if g_idx:
                tensors[f"{root}.g_idx"] = torch.arange(codes.shape[1], dtype=torch.int32) // self.GROUP
        return tensors

    def awq(self, problem) -> dict[str, Tensor]:
        tensors = {}
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        for root, (codes, zeros, scales) in problem.items():
            tensors[f"{root}.qweight"] = torch.from_numpy(self.words(codes.T, order))
            tensors[f"{root}.qzeros"] = torch.from_numpy(self.words(zeros.T, order))
            tensors[f"{root}.scales"] = torch.from_numpy(scales.T.copy())
        return tensors

    def check(self, raw, problem):
        assert raw.scheme == "int4" and raw.w13_scale.dtype == torch.float16
        for e in range(self.EXPERTS):
            values = {}
            for p in PROJECTIONS:
                codes, zeros, scales = problem[f"{ROOT}.{e}.{p}"]
                spread = [np.repeat(x, self.GROUP, axis=1).astype(np.float32) for x in (zeros, scales)]
                values[p] = (codes - spread[0]) * spread[1]
            want = np.concatenate([values["gate_proj"], values["up_proj"]])
            np.testing.assert_array_equal(decode(raw, "w13", e), want)
            np.testing.assert_array_equal(decode(raw, "w2", e), values["down_proj"])

    @pytest.mark.parametrize("symmetric", [True, False])
    @pytest.mark.parametrize("version", [1, 2])
    def test_gptq(self, tmp_path, symmetric, version):
        problem = self.problem(symmetric)
        quantization = {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2" if version == 2 else "gptq"}
        folder = write(
            tmp_path,
            self.gptq(problem, version=version, g_idx=version == 1),
            {**CONFIG, "quantization_config": quantization},
        )
        raw = load_experts(folder, 0)
        assert (raw.w13_zero_point is None) == symmetric
        self.check(raw, problem)

    @pytest.mark.parametrize("symmetric", [True, False])
    def test_awq(self, tmp_path, symmetric):
        problem = self.problem(symmetric)
        quantization = {"quant_method": "awq", "bits": 4, "version": "gemm"}
        folder = write(tmp_path, self.awq(problem), {**CONFIG, "quantization_config": quantization})
        self.check(load_experts(folder, 0), problem)

    def test_activation_order_is_refused(self, tmp_path):
        tensors = self.gptq(self.problem(True), version=1, g_idx=True)
        key = f"{ROOT}.1.down_proj.g_idx"
        tensors[key] = tensors[key].flip(0)
        with pytest.raises(CheckpointError, match=rf"{key} \(expert 1, down\) must be in order: .*desc_act"):
            load_experts(write(tmp_path, tensors, CONFIG), 0)

    def test_eight_bits_are_refused(self, tmp_path):
        tensors = self.gptq(self.problem(True), version=1, g_idx=False)
        key = f"{ROOT}.0.gate_proj.qzeros"
        tensors[key] = tensors[key].repeat(1, 2)
        with pytest.raises(CheckpointError, match=rf"{key} \(expert 0, gate\) must have shape \(4, 6\), got \(4, 12\)"):
            load_experts(write(tmp_path, tensors, CONFIG), 0)
