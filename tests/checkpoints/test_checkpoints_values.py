"""Scales that are all zero and values that are NaN: refused, with tensor and expert. Single zeros are legal."""

from __future__ import annotations

import math

import pytest
import torch
from checkpoints_support import FIXTURES, changed, config_of, stored, write

from torch_moe_ops.checkpoints import CheckpointError, load_experts

# fixture, name of one expert's scales, expert and projection as messages say
SCALES = {
    "fp8 per tensor": ("qwen3_moe_modelopt_fp8", "model.layers.0.mlp.experts.3.up_proj.weight_scale", "expert 3, up"),
    "fp8 channel": ("qwen3_moe_ct_fp8_channel", "model.layers.0.mlp.experts.3.up_proj.weight_scale", "expert 3, up"),
    "fp8_block": ("qwen3_moe_fp8_block", "model.layers.0.mlp.experts.2.down_proj.weight_scale_inv", "expert 2, down"),
    "int8": ("qwen3_moe_ct_int8", "model.layers.0.mlp.experts.7.gate_proj.weight_scale", "expert 7, gate"),
    "mxint4": ("qwen3_moe_ct_int4_g32", "model.layers.0.mlp.experts.1.down_proj.weight_scale", "expert 1, down"),
    "nvfp4": ("qwen3_moe_modelopt_nvfp4", "model.layers.0.mlp.experts.5.gate_proj.weight_scale", "expert 5, gate"),
    "nvfp4 ct": ("qwen3_moe_ct_nvfp4", "model.layers.0.mlp.experts.5.down_proj.weight_scale", "expert 5, down"),
    "mxfp4": ("qwen3_moe_ct_mxfp4", "model.layers.0.mlp.experts.0.up_proj.weight_scale", "expert 0, up"),
    "gpt-oss": ("gpt_oss_mxfp4", "model.layers.0.mlp.experts.gate_up_proj_scales", "expert 2, gate_up"),
}


def spoiled(tmp_path, name, key, change):
    """The fixture with `change` applied to a copy of a tensor (of expert 2 where all experts share it)."""

    def replace(tensors):
        value = tensors[key].clone()
        change(value[2] if key.endswith(("_proj_scales", "_proj_bias", "gate_up_proj", ".down_proj")) else value)
        tensors[key] = value

    return changed(tmp_path, name, replace)


def set_codes(code):
    """Every byte of a tensor, or the one at [..., 1] of its last row."""

    def change(value, one=False):
        flat = value.view(torch.uint8) if value.element_size() == 1 else value
        if one:
            flat[(-1,) * (value.ndim - 1) + (1,)] = code
        else:
            flat.fill_(code)

    return change


@pytest.mark.parametrize("case", SCALES)
def test_scales_that_are_all_zero(tmp_path, case):
    name, key, where = SCALES[case]
    folder = spoiled(tmp_path, name, key, set_codes(0))
    with pytest.raises(CheckpointError, match=rf"tensor {key} \({where}\) must (hold a scale that is not zero|be fin)"):
        load_experts(folder, 0)


@pytest.mark.parametrize("case", [case for case in SCALES if case != "fp8 per tensor"])
def test_all_scales_but_one_may_be_zero(tmp_path, case):
    name, key, _ = SCALES[case]

    def change(value):
        last = value.view(torch.uint8).flatten()[-value.element_size() :].clone()
        set_codes(0)(value)
        value.view(torch.uint8).view(-1)[-value.element_size() :] = last

    if case == "fp8_block":  # the last tile of this fixture's scales may be an edge of zeros
        change = lambda value: value.view(-1)[1:].fill_(0)  # noqa: E731
    raw = load_experts(spoiled(tmp_path, name, key, change), 0)
    assert raw.w13.shape == load_experts(FIXTURES / name, 0).w13.shape


def test_minus_zero_is_zero(tmp_path):
    name, key, _ = SCALES["nvfp4"]
    with pytest.raises(CheckpointError, match="must hold a scale that is not zero"):
        load_experts(spoiled(tmp_path, name, key, set_codes(0x80)), 0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0])
@pytest.mark.parametrize("case", ["fp8 channel", "fp8_block", "int8"])
def test_scales_that_are_no_scales(tmp_path, case, value):
    name, key, where = SCALES[case]
    folder = spoiled(tmp_path, name, key, lambda t: t.view(-1)[1:2].fill_(value))
    with pytest.raises(CheckpointError, match=rf"tensor {key} \({where}\) must hold finite scales, .* got {value} at"):
        load_experts(folder, 0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_signed_scales_that_are_no_scales(tmp_path, value):
    name, key, where = SCALES["mxint4"]
    folder = spoiled(tmp_path, name, key, lambda t: t.view(-1)[1:2].fill_(value))
    with pytest.raises(CheckpointError, match=rf"tensor {key} \({where}\) must hold finite scales, got {value} at"):
        load_experts(folder, 0)
    negative = spoiled(tmp_path / "negative", name, key, lambda t: t.neg_())
    assert (load_experts(negative, 0).w2_scale[1] <= 0).all()


FP8 = {
    "per tensor": ("qwen3_moe_modelopt_fp8", "weight"),
    "channel": ("qwen3_moe_ct_fp8_channel", "weight"),
    "block": ("qwen3_moe_fp8_block", "weight"),
}


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("case", FP8)
@pytest.mark.parametrize(("expert", "projection"), [(0, "gate"), (2, "down")])
def test_fp8_codes_that_are_nan(tmp_path, case, code, expert, projection):
    name, part = FP8[case]
    key = f"model.layers.0.mlp.experts.{expert}.{projection}_proj.{part}"
    folder = spoiled(tmp_path, name, key, lambda t: t.view(torch.uint8)[-1, 1:2].fill_(code))
    row = stored(name)[key].shape[0] - 1
    with pytest.raises(
        CheckpointError, match=rf"tensor {key} \(expert {expert}, {projection}\) .*NaN, got one at \({row}, 1\)"
    ):
        load_experts(folder, 0)


def test_every_other_fp8_code_is_a_number(tmp_path):
    name, key = "qwen3_moe_ct_fp8_channel", "model.layers.0.mlp.experts.0.up_proj.weight"
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
    folder = spoiled(tmp_path, name, key, lambda t: t.view(torch.uint8).view(-1)[:254].copy_(codes))
    assert torch.equal(load_experts(folder, 0).w13[0, 48:].view(torch.uint8).flatten()[:254], codes)


def mxfp8(tmp_path, code):
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for p, (n, k) in {"gate_proj": (32, 64), "up_proj": (32, 64), "down_proj": (64, 32)}.items():
        root = f"model.layers.0.mlp.experts.0.{p}"
        tensors[f"{root}.weight"] = torch.randn(n, k, generator=generator).to(torch.float8_e4m3fn)
        tensors[f"{root}.weight_scale"] = torch.full((n, k // 32), 120, dtype=torch.uint8)
    tensors["model.layers.0.mlp.experts.0.up_proj.weight"].view(torch.uint8)[3, 4] = code
    return write(tmp_path, tensors)


def test_mxfp8_codes_that_are_nan(tmp_path):
    assert load_experts(mxfp8(tmp_path, 0x7E), 0).scheme == "mxfp8"
    with pytest.raises(
        CheckpointError, match=r"0\.up_proj\.weight \(expert 0, up\) must hold no NaN, got one at \(3, 4\)"
    ):
        load_experts(mxfp8(tmp_path, 0x7F), 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("part", ["weight", "bias"])
def test_nan_in_floats(tmp_path, dtype, part):
    shapes = {"gate_proj": (4, 6), "up_proj": (4, 6), "down_proj": (6, 4)}
    tensors = {
        f"m.layers.0.experts.{e}.{p}.weight": torch.ones(s, dtype=dtype) for e in range(3) for p, s in shapes.items()
    }
    tensors |= {
        f"m.layers.0.experts.{e}.{p}.bias": torch.ones(s[0], dtype=dtype) for e in range(3) for p, s in shapes.items()
    }
    assert load_experts(write(tmp_path, tensors), 0).num_experts == 3
    key = f"m.layers.0.experts.1.down_proj.{part}"
    tensors[key].view(-1)[3] = math.nan
    place = r"\(0, 3\)" if part == "weight" else r"\(3,\)"
    with pytest.raises(CheckpointError, match=rf"tensor {key} \(expert 1, down\) must hold no NaN, got one at {place}"):
        load_experts(write(tmp_path, tensors), 0)


@pytest.mark.parametrize("projection", ["gate_up", "down"])
def test_nan_in_fused_biases(tmp_path, projection):
    key = f"model.layers.0.mlp.experts.{projection}_proj_bias"
    folder = spoiled(tmp_path, "gpt_oss_mxfp4", key, lambda t: t[5:6].fill_(math.nan))
    with pytest.raises(
        CheckpointError, match=rf"tensor {key} \(expert 2, {projection}\) must hold no NaN, got one at \(5,\)"
    ):
        load_experts(folder, 0)


def test_gptq_scales_that_are_all_zero(tmp_path):
    root = "model.layers.0.mlp.experts.0"
    tensors = {}
    for p, (n, k) in {"gate_proj": (32, 64), "up_proj": (32, 64), "down_proj": (64, 32)}.items():
        tensors[f"{root}.{p}.qweight"] = torch.ones(k // 8, n, dtype=torch.int32)
        tensors[f"{root}.{p}.qzeros"] = torch.ones(k // 32, n // 8, dtype=torch.int32)
        tensors[f"{root}.{p}.scales"] = torch.zeros(k // 32, n, dtype=torch.float16)
    for p in ("gate_proj", "up_proj"):
        tensors[f"{root}.{p}.scales"] += 1
    with pytest.raises(
        CheckpointError, match=r"0\.down_proj\.scales \(expert 0, down\) must hold a scale that is not z"
    ):
        load_experts(write(tmp_path, tensors), 0)


def test_rows_of_zeros_as_published_files_have_them(tmp_path):
    """A row that no token uses: its scales are all zero, others are not."""
    name = "qwen3_moe_modelopt_nvfp4"
    tensors = stored(name)
    for key in [key for key in tensors if key.endswith("weight_scale") and ".experts." in key]:
        value = tensors[key].view(torch.uint8).clone()
        value[:7] = 0
        tensors[key] = value.view(torch.float8_e4m3fn)
    raw = load_experts(write(tmp_path, tensors, config_of(name)), 0)
    assert not raw.w2_scale[:, :7].float().any() and raw.w2_scale[:, 7:].float().all()
