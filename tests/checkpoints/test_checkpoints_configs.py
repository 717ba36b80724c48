"""config.json that contradicts itself or the files, and files that change while they are known."""

from __future__ import annotations

import json
import math
import os
import struct

import pytest
import torch
from checkpoints_support import FIXTURES, changed, config_of, copied, stored, write

from torch_moe_ops.checkpoints import CheckpointError, index, load_experts
from torch_moe_ops.checkpoints.model_config import parse_config

NAME = "qwen3_moe_modelopt_nvfp4"
BLOCK = "qwen3_moe_fp8_block"
ROOT = "model.layers.0.mlp.experts"


def refuses(folder, *texts):
    with pytest.raises(CheckpointError) as caught:
        load_experts(folder, 0)
    for text in texts:
        assert text in str(caught.value), str(caught.value)


def with_config(tmp_path, name, text=None, **values):
    folder = copied(tmp_path, name)
    (folder / "config.json").write_text(text or json.dumps(config_of(name) | values))
    return folder


SIZES = [
    '["a", "b"]',
    "[null, 1]",
    "[1e999, 1]",
    "[NaN, 1]",
    "[128.0, 128.0]",
    "[128]",
    "[128, 128, 128]",
    "[]",
    '"128"',
]
SIZES += ["[0, 128]", "[-1, -1]", "[true, true]", "0", "{}", "1e999"]


@pytest.mark.parametrize("size", SIZES)
def test_block_sizes_that_are_none(tmp_path, size):
    text = f'{{"hidden_act": "silu", "quantization_config": {{"quant_method": "fp8", "weight_block_size": {size}}}}}'
    name = "qwen3_moe_modelopt_fp8"
    folder = with_config(tmp_path, name, text)
    refuses(folder, f"{folder}/config.json: weight_block_size must be null or two positive integers, got ")


def test_block_structures_that_are_none(tmp_path):
    groups = {"group_0": {"weights": {"strategy": "block", "block_structure": ["x", 1]}}}
    folder = with_config(tmp_path, "qwen3_moe_modelopt_fp8", quantization_config={"config_groups": groups})
    refuses(folder, f"{folder}/config.json: block_structure must be null or two positive integers, got ['x', 1]")


@pytest.mark.parametrize("limit", ["NaN", "-1", '"7"', "1e999", "-Infinity", "true", "[7]", "9" * 308 + ".0e10"])
@pytest.mark.parametrize("scope", ["%s", '{"text_config": %s}', '{"swiglu_limit": 7, "llm_config": %s}'])
def test_limits_that_are_none(tmp_path, limit, scope):
    text = scope % f'{{"hidden_act": "silu", "swiglu_limit": {limit}}}'
    folder = with_config(tmp_path, NAME, text)
    refuses(folder, f"{folder}/config.json: swiglu_limit must be null or a finite number, zero or greater, got ")


@pytest.mark.parametrize("name", ["swiglu_alpha", "swiglu_beta"])
def test_constants_that_are_none(tmp_path, name):
    folder = with_config(tmp_path, "gpt_oss_mxfp4", **{name: "1"})
    refuses(folder, f"{folder}/config.json: {name} must be null or a finite number, got '1'")
    folder = with_config(tmp_path / "negative", "gpt_oss_mxfp4", **{name: -1})
    assert getattr(load_experts(folder, 0), name) == -1


def test_a_number_of_many_digits(tmp_path):
    folder = with_config(tmp_path, NAME, f'{{"hidden_act": "silu", "swiglu_limit": {10**400}}}')
    refuses(folder, f"{folder}/config.json: must be a JSON object: an integer must have at most 308 digits, got 401")
    with pytest.raises(CheckpointError, match=r"config\.json: swiglu_limit must be null or a finite number"):
        parse_config({"swiglu_limit": 10**400}, {})
    assert parse_config({"swiglu_limit": 10**308 - 1}, {}).constants == {"swiglu_limit": 1e308}


def test_an_expert_number_of_many_digits(tmp_path):
    tensors = stored(NAME)
    tensors[f"{ROOT}.{'9' * 5000}.up_proj.weight"] = torch.zeros(1)
    refuses(write(tmp_path, tensors), f"{tmp_path}/model.safetensors: tensor names must have at most 512 characters")
    tensors = stored(NAME)
    tensors[f"{ROOT}.{'9' * 400}.up_proj.weight"] = torch.zeros(1)
    refuses(write(tmp_path, tensors), f"{tmp_path} layer 0: expert 999")


@pytest.mark.parametrize("digit", ["٣", "³"])
def test_numbers_are_in_ascii(tmp_path, digit):
    tensors = stored(NAME)
    tensors[f"{ROOT}.{digit}.up_proj.weight"] = torch.zeros(1)
    refuses(write(tmp_path, tensors), f"unused tensor {ROOT}.{digit}.up_proj.weight")


@pytest.mark.parametrize("scope", [lambda config: config, lambda config: {"text_config": config}])
def test_counts_of_experts_that_contradict_each_other(tmp_path, scope):
    config = {"hidden_act": "silu", "num_experts": 8, "num_local_experts": 4}
    folder = with_config(tmp_path, NAME, json.dumps(scope(config)))
    got = "{'num_local_experts': 4, 'num_experts': 8}"
    refuses(folder, f"{folder}/config.json: num_local_experts and num_experts must agree, got {got}")
    (folder / "config.json").write_text(json.dumps(scope(config | {"num_local_experts": 8})))
    assert load_experts(folder, 0).num_experts == 8


@pytest.mark.parametrize("value", ["8", 8.0, -8, True, math.nan, {}])
@pytest.mark.parametrize("key", ["num_experts", "n_routed_experts", "num_hidden_layers"])
def test_counts_that_are_none(tmp_path, key, value):
    folder = with_config(tmp_path, NAME, **{key: value})
    refuses(folder, f"{folder}/config.json: {key} must be null or an integer, zero or greater, got ")


def test_counts_of_several_kinds_of_experts(tmp_path):
    """Ernie's config has a list: experts for text, and for images."""
    assert load_experts(with_config(tmp_path, NAME, moe_num_experts=[8, 8], num_experts=None), 0).num_experts == 8


@pytest.mark.parametrize("extra", [1, 4096])
def test_trailing_bytes(tmp_path, extra):
    folder = copied(tmp_path, NAME)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes() + bytes(extra))
    refuses(folder, f"{file}: {extra} bytes after tensor ", "every byte of the data must belong to a tensor")


def test_bytes_between_tensors(tmp_path):
    folder = copied(tmp_path, NAME)
    file = folder / "model.safetensors"
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    for name, entry in header.items():
        if name != "__metadata__":
            entry["data_offsets"] = [offset + 3 for offset in entry["data_offsets"]]
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(3) + content[8 + length :])
    refuses(folder, f"{file}: 3 bytes between the header and tensor ")


def narrow(hidden, inter, part="weight_scale_inv"):
    """Tiles of 128 x 128 where one row of them is as wide as the matrix has rows."""
    generator = torch.Generator().manual_seed(4)
    tensors = {}
    for p, (n, k) in {"gate_proj": (inter, hidden), "up_proj": (inter, hidden), "down_proj": (hidden, inter)}.items():
        weight = torch.randn(n, k, generator=generator).to(torch.float8_e4m3fn)
        tensors[f"{ROOT}.0.{p}.weight"] = weight
        tensors[f"{ROOT}.0.{p}.{part}"] = torch.rand(-(-n // 128), -(-k // 128), generator=generator) + 0.5
    return tensors


@pytest.mark.parametrize("part", ["weight_scale_inv", "weight_scale"])
@pytest.mark.parametrize("block_size", [[128, 128], None])
@pytest.mark.parametrize(("hidden", "inter"), [(1024, 8), (2048, 16), (1000, 8)])
def test_fp8_tiles_as_many_as_rows(tmp_path, part, block_size, hidden, inter):
    tensors = narrow(hidden, inter, part)
    config = {"hidden_act": "silu", "quantization_config": {"quant_method": "fp8", "weight_block_size": block_size}}
    raw = load_experts(write(tmp_path, tensors, config), 0)
    assert raw.scheme == "fp8_block"
    assert torch.equal(raw.w13_scale[0, :1], tensors[f"{ROOT}.0.gate_proj.{part}"])
    assert torch.equal(raw.w2_scale[0], tensors[f"{ROOT}.0.down_proj.{part}"])


def test_channel_scales_as_wide_as_tiles_are(tmp_path):
    """compressed-tensors says in its config what one row of eight scales is."""
    tensors = narrow(1024, 8, "weight_scale")
    tensors[f"{ROOT}.0.down_proj.weight_scale"] = torch.rand(1024, 1) + 0.5
    groups = {"group_0": {"weights": {"strategy": "channel", "num_bits": 8}}}
    config = {"hidden_act": "silu", "quantization_config": {"config_groups": groups}}
    assert load_experts(write(tmp_path, tensors, config), 0).scheme == "fp8"


def test_tiles_of_alternating_rows_are_refused(tmp_path):
    """A tile of 128 gate and up rows in turn has one scale for both: it cannot be split into halves."""
    generator = torch.Generator().manual_seed(6)
    tensors = {
        f"{ROOT}.gate_up_proj": torch.randn(2, 512, 128, generator=generator).to(torch.float8_e4m3fn),
        f"{ROOT}.gate_up_proj_scale_inv": torch.rand(2, 4, 1, generator=generator) + 0.5,
        f"{ROOT}.down_proj": torch.randn(2, 128, 256, generator=generator).to(torch.float8_e4m3fn),
        f"{ROOT}.down_proj_scale_inv": torch.rand(2, 1, 2, generator=generator) + 0.5,
    }
    config = {"model_type": "gpt_oss", "quantization_config": {"weight_block_size": [128, 128]}}
    refuses(
        write(tmp_path, tensors, config), f"tensor {ROOT}.gate_up_proj (expert 0, gate_up) must have gate rows first"
    )
    assert load_experts(write(tmp_path, tensors, config | {"model_type": "x"}), 0).scheme == "fp8_block"


@pytest.mark.parametrize("shape", [(), (6144,)])
def test_shapes_without_columns(tmp_path, shape):
    tensors = stored("qwen3_moe_ct_int4_g32")
    for key in tensors:
        if key.endswith("weight_packed"):
            tensors[key] = torch.zeros(shape, dtype=torch.int32)
    refuses(write(tmp_path, tensors), "weight_packed (expert 0, gate) must have 2 dimensions per expert")
    names = {"weight_packed": "qweight", "weight_scale": "scales", "weight_shape": "qzeros"}
    tensors = {
        key.replace(old, new): t for key, t in tensors.items() for old, new in names.items() if key.endswith(old)
    }
    refuses(write(tmp_path, tensors), "qweight (expert 0, gate) must have 2 dimensions per expert")


def same_size_and_time(folder, tensors, *, in_place):
    """Another file under the old one's name, of the same size and with the same time of change."""
    file = folder / "model.safetensors"
    before = file.stat()
    write(folder / "other", tensors)
    content = (folder / "other" / "model.safetensors").read_bytes()
    assert len(content) == before.st_size
    if in_place:
        with open(file, "r+b") as stream:
            stream.write(content)
    else:
        os.replace(folder / "other" / "model.safetensors", file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_mtime_ns == before.st_mtime_ns


def renamed():
    """The fixture with one tensor under a name that no format has, of the same length: another header, the same size."""
    tensors = stored(NAME)
    tensors[f"{ROOT}.1.up_proj.weight_scale_3"] = tensors.pop(f"{ROOT}.1.up_proj.weight_scale_2")
    return tensors


@pytest.mark.parametrize("in_place", [True, False])
def test_a_file_replaced_by_one_of_the_same_size_and_time(tmp_path, in_place):
    folder = changed(tmp_path, NAME, lambda tensors: None)
    assert load_experts(folder, 0).num_experts == 8
    same_size_and_time(folder, renamed(), in_place=in_place)
    refuses(folder, "unused tensor", "weight_scale_3")


def test_a_file_replaced_so_that_its_stamp_does_not_tell(tmp_path, monkeypatch):
    """A clock that is too coarse: the reader compares headers, and the next load starts anew."""
    folder = changed(tmp_path, NAME, lambda tensors: None)
    monkeypatch.setattr(index, "_stamp", lambda file: (0,))
    first = load_experts(folder, 0)
    same_size_and_time(folder, renamed(), in_place=True)
    refuses(folder, f"{folder}/model.safetensors: its header has changed since it was indexed")
    refuses(folder, "unused tensor", "weight_scale_3")
    assert first.num_experts == 8


def test_a_file_replaced_between_two_layers(tmp_path):
    folder = changed(tmp_path, NAME, lambda tensors: None)
    layers = load_experts(folder, None)
    next(layers)
    same_size_and_time(folder, renamed(), in_place=False)
    with pytest.raises(CheckpointError, match="its header has changed since it was indexed"):
        next(layers)


def test_a_config_replaced_by_one_of_the_same_size_and_time(tmp_path):
    folder = copied(tmp_path, NAME)
    assert load_experts(folder, 0).activation == "silu"
    file = folder / "config.json"
    before = file.stat()
    with open(file, "r+b") as stream:
        stream.write(file.read_bytes().replace(b'"silu"', b'"gelu"'))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert load_experts(folder, 0).activation == "gelu"


def test_hidden_act_is_shortened_in_the_warning(tmp_path):
    folder = with_config(tmp_path, NAME, hidden_act="x" * 100_000)
    with pytest.warns(UserWarning, match="of a gated expert is unknown") as caught:
        load_experts(folder, 0)
    assert len(str(caught[0].message)) < 300


def test_fixtures_still_load():
    for folder in sorted(FIXTURES.iterdir()):
        assert all(raw.num_experts > 1 for raw in load_experts(folder, None, mtp=True))
