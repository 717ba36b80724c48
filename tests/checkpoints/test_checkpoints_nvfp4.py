"""The seven NVFP4 fixtures against what their own tools dequantized."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from checkpoints_support import (
    FIXTURES,
    NVFP4_FIXTURES,
    changed,
    config_of,
    decode,
    e2m1_values,
    e4m3_values,
    expected,
    expected_layers,
    stored,
)

from torch_moe_ops import dequantize_experts
from torch_moe_ops.checkpoints import CheckpointError, load_experts

MODELOPT = [name for name in NVFP4_FIXTURES if "modelopt" in name]
CT = "qwen3_moe_ct_nvfp4"


def test_there_are_seven():
    assert len(NVFP4_FIXTURES) == 7


@pytest.mark.parametrize("name", MODELOPT)
@pytest.mark.parametrize("expert", [0, 1])
def test_modelopt_weights_bit_for_bit(name, expert):
    oracle = expected(name)
    for layer in expected_layers(name):
        raw = load_experts(FIXTURES / name, layer)
        assert raw.scheme == "nvfp4"
        for which in ("w13", "w2"):
            deq = oracle[f"layers.{layer}.{which}_deq_e{expert}"].numpy()
            np.testing.assert_array_equal(decode(raw, which, expert), deq, strict=True)


@pytest.mark.parametrize("name", MODELOPT)
def test_modelopt_weights_through_the_library(name):
    oracle = expected(name)
    for layer in expected_layers(name):
        dequantized = dequantize_experts(load_experts(FIXTURES / name, layer))
        for which, values in zip(("w13", "w2"), dequantized, strict=True):
            for expert in (0, 1):
                assert torch.equal(values[expert], oracle[f"layers.{layer}.{which}_deq_e{expert}"])


@pytest.mark.parametrize("expert", [0, 1])
def test_compressed_tensors_weights(expert):
    """The tool divides by the stored scale; the reciprocal taken at load costs up to one ulp, its product another."""
    raw, oracle, files = load_experts(FIXTURES / CT, 0), expected(CT), stored(CT)
    root = f"model.layers.0.mlp.experts.{expert}"
    inter = raw.intermediate_size
    for which, rows, projection in (
        ("w13", slice(0, inter), "gate_proj"),
        ("w13", slice(inter, None), "up_proj"),
        ("w2", slice(None), "down_proj"),
    ):
        deq = oracle[f"layers.0.{which}_deq_e{expert}"].numpy()[rows]
        np.testing.assert_allclose(decode(raw, which, expert)[rows], deq, rtol=2.0**-22, atol=0)
        divisor = files[f"{root}.{projection}.weight_global_scale"].numpy()
        codes = e2m1_values(getattr(raw, which)[expert, rows])
        scale = e4m3_values(getattr(raw, f"{which}_scale")[expert, rows]) / divisor
        np.testing.assert_array_equal(codes * np.repeat(scale, 16, axis=-1), deq)


def test_compressed_tensors_scales_are_reciprocals_per_half():
    raw, files = load_experts(FIXTURES / CT, 0), stored(CT)
    one = np.float32(1)
    for expert in range(raw.num_experts):
        scales = {
            p: (
                one / files[f"model.layers.0.mlp.experts.{expert}.{p}_proj.weight_global_scale"].item(),
                one / files[f"model.layers.0.mlp.experts.{expert}.{p}_proj.input_global_scale"].item(),
            )
            for p in ("gate", "up", "down")
        }
        assert raw.w13_scale_2[expert, 0] == np.float32(scales["gate"][0])
        assert raw.w13_scale_2[expert, 1] == np.float32(scales["up"][0])
        assert raw.w2_scale_2[expert] == np.float32(scales["down"][0])
        assert raw.a13_input_scale[expert] == np.float32(max(scales["gate"][1], scales["up"][1]))
        assert raw.a2_input_scale[expert] == np.float32(scales["down"][1])
    different = (raw.w13_scale_2[:, 0] != raw.w13_scale_2[:, 1]).tolist()
    assert different == [e % 3 == 2 or e == raw.num_experts - 1 for e in range(raw.num_experts)]


@pytest.mark.parametrize("name", [n for n in MODELOPT if not n.startswith("gpt_oss")])
def test_modelopt_scalars_multiply_as_stored(name):
    files = stored(name)
    for layer in expected_layers(name):
        raw = load_experts(FIXTURES / name, layer)
        root = next(key for key in files if f"layers.{layer}." in key and ".experts.0." in key).split(".experts.")[0]
        gate, up, down = ("w1", "w3", "w2") if "mixtral" in name else ("gate_proj", "up_proj", "down_proj")
        halves = [gate, up] if raw.is_gated else [up]
        for e in range(raw.num_experts):
            get = lambda p, part, e=e, root=root: files[f"{root}.experts.{e}.{p}.{part}"]  # noqa: E731
            assert raw.w13_scale_2[e].tolist() == [get(p, "weight_scale_2").item() for p in halves]
            assert raw.w2_scale_2[e] == get(down, "weight_scale_2")
            if "w4a16" in name:
                assert raw.a13_input_scale is None and raw.a2_input_scale is None
                continue
            assert raw.a13_input_scale[e] == max(get(p, "input_scale") for p in halves)
            assert raw.a2_input_scale[e] == get(down, "input_scale")


@pytest.mark.parametrize("larger", ["gate_proj", "up_proj"])
def test_larger_of_two_input_scales(tmp_path, larger):
    name, root = "qwen3_moe_modelopt_nvfp4", "model.layers.0.mlp.experts.3"
    folder = changed(tmp_path, name, lambda t: t.update({f"{root}.{larger}.input_scale": torch.tensor(0.75)}))
    raw, before = load_experts(folder, 0), load_experts(FIXTURES / name, 0)
    assert raw.a13_input_scale[3] == 0.75 and (before.a13_input_scale < 0.75).all()
    assert torch.equal(raw.a13_input_scale[:3], before.a13_input_scale[:3])


def test_gpt_oss_is_deinterleaved_with_biases_and_shared_scales():
    name = "gpt_oss_modelopt_nvfp4"
    raw, oracle, files = load_experts(FIXTURES / name, 0), expected(name), stored(name)
    for e in (0, 1):
        np.testing.assert_array_equal(raw.w13_bias[e].float().numpy(), oracle[f"layers.0.b13_e{e}"].numpy())
        np.testing.assert_array_equal(raw.w2_bias[e].float().numpy(), oracle[f"layers.0.b2_e{e}"].numpy())
    root = "model.layers.0.mlp.experts"
    assert raw.a13_input_scale.shape == () and raw.a13_input_scale == files[f"{root}.gate_up_proj_input_scale"]
    assert raw.a2_input_scale.shape == () and raw.a2_input_scale == files[f"{root}.down_proj_input_scale"]
    assert torch.equal(raw.w13_scale_2, files[f"{root}.gate_up_proj_weight_scale_2"].expand(raw.num_experts, 2))
    assert (raw.activation, raw.swiglu_alpha, raw.swiglu_beta, raw.swiglu_limit) == ("swigluoai", 1.702, 1.0, 7.0)


def test_llama4_style_fused_rows_are_concatenated(tmp_path):
    """The same file under another model's name, without biases: gate rows come first, then up rows."""
    name = "gpt_oss_modelopt_nvfp4"
    config = {"model_type": "llama4_text", "hidden_act": "silu"}
    folder = changed(tmp_path, name, lambda t: [t.pop(key) for key in list(t) if key.endswith("proj_bias")])
    (folder / "config.json").write_text(json.dumps(config))
    raw, files = load_experts(folder, 0), stored(name)
    root = "model.layers.0.mlp.experts"
    packed = files[f"{root}.gate_up_proj"].numpy()
    np.testing.assert_array_equal(raw.w13.numpy(), packed.transpose(0, 2, 1))
    scale = files[f"{root}.gate_up_proj_weight_scale"].view(torch.uint8).numpy()
    np.testing.assert_array_equal(raw.w13_scale.view(torch.uint8).numpy(), scale.transpose(0, 2, 1))
    assert raw.activation == "silu" and raw.w13_bias is None


@pytest.mark.parametrize("name", NVFP4_FIXTURES)
def test_activation_and_source(name):
    layer = expected_layers(name)[0]
    raw = load_experts(FIXTURES / name, layer)
    kind = config_of(name)["model_type"]
    wanted = {"gpt_oss": "swigluoai", "nemotron_h": "relu2_no_mul"}.get(kind, "silu")
    assert raw.activation == wanted
    assert raw.source.endswith(f"{name} layer {layer}")
    if wanted != "swigluoai":
        assert raw.swiglu_alpha is None and raw.swiglu_beta is None and raw.swiglu_limit is None


@pytest.mark.parametrize(
    "suffix", ["gate_proj.weight_scale_2", "up_proj.weight_scale_2", "down_proj.input_scale", "gate_proj.input_scale"]
)
@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan"), -1.0])
def test_modelopt_scalars_must_be_finite_and_positive(tmp_path, suffix, value):
    name = "qwen3_moe_modelopt_nvfp4"
    bad = f"model.layers.1.mlp.experts.5.{suffix}"
    folder = changed(tmp_path, name, lambda t: t.update({bad: torch.tensor(value)}))
    with pytest.raises(CheckpointError, match=rf"{bad} \(expert 5, .*must be finite and positive, got {value}"):
        load_experts(folder, 1)
    assert load_experts(folder, 0).num_experts == 8
    if "input" in suffix:
        raw = load_experts(folder, 1, input_scales=False)
        assert raw.a13_input_scale is None and raw.a2_input_scale is None


@pytest.mark.parametrize("part", ["weight_global_scale", "input_global_scale"])
@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan"), 1e-45])
def test_compressed_tensors_scalars_must_be_finite_and_positive(tmp_path, part, value):
    bad = f"model.layers.0.mlp.experts.3.up_proj.{part}"
    folder = changed(tmp_path, CT, lambda t: t.update({bad: torch.tensor([value])}))
    with pytest.raises(CheckpointError, match=rf"{bad} \(expert 3, up\) must"):
        load_experts(folder, 0)


@pytest.mark.parametrize("byte", [0x7F, 0xFF, 0x81])
def test_block_scales_must_be_numbers_and_not_negative(tmp_path, byte):
    name = "mixtral_modelopt_nvfp4"
    bad = "model.layers.0.block_sparse_moe.experts.2.w3.weight_scale"

    def change(tensors):
        scale = tensors[bad].view(torch.uint8).clone()
        scale[4, 1] = byte
        tensors[bad] = scale.view(torch.float8_e4m3fn)

    with pytest.raises(CheckpointError, match=rf"{bad} \(expert 2, up\) must hold finite scales.*at \(4, 1\)"):
        load_experts(changed(tmp_path, name, change), 0)


def test_zero_block_scales_are_legal(tmp_path):
    name = "mixtral_modelopt_nvfp4"
    key = "model.layers.0.block_sparse_moe.experts.2.w3.weight_scale"

    def change(tensors):
        scale = tensors[key].view(torch.uint8).clone()
        scale[0, 0], scale[1, 1] = 0, 0x80
        tensors[key] = scale.view(torch.float8_e4m3fn)

    raw = load_experts(changed(tmp_path, name, change), 0)
    assert raw.w13_scale[2, raw.intermediate_size, 0].float() == 0
