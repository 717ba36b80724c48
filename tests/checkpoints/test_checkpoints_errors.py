"""One clear error for each kind of damage, naming file, tensor and expert."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from checkpoints_support import FIXTURES, changed, config_of, copied, raw_file, stored, write

from torch_moe_ops.checkpoints import CheckpointError, load_experts

NAME = "qwen3_moe_modelopt_nvfp4"
ROOT = "model.layers.0.mlp.experts"
SHARDED = "deepseek_v3_modelopt_nvfp4"


def refuses(folder: Path, *texts: str, layer: int | None = 0):
    with pytest.raises(CheckpointError) as caught:
        load_experts(folder, layer)
    for text in texts:
        assert text in str(caught.value), str(caught.value)
    assert len(str(caught.value)) < 600


ENTRY = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
# header, data, what the message says
BAD_HEADERS = {
    "empty": (b"", b"", "header must be a JSON object"),
    "not json": (b"{nonsense", b"", "header must be a JSON object"),
    "not utf-8": (b'{"\xff": 1}', b"", "header must be a JSON object"),
    "deeply nested": (b"[" * 200_000, b"", "header must be a JSON object"),
    "a list": ([1], b"", "header must be a JSON object, got list"),
    "entry is a number": ({"a": 1}, b"", "tensor a: its header entry must be an object, got 1"),
    "no dtype": ({"a": {"shape": [], "data_offsets": [0, 0]}}, b"", "tensor a: dtype must be one of"),
    "unknown dtype": ({"a": {**ENTRY, "dtype": "F5"}}, bytes(4), "'F32'"),
    "shape is text": ({"a": {**ENTRY, "shape": "4"}}, bytes(4), "tensor a: shape must be a list of sizes, got '4'"),
    "negative size": ({"a": {**ENTRY, "shape": [-4]}}, bytes(4), "shape must be a list of sizes, got [-4]"),
    "boolean size": ({"a": {**ENTRY, "shape": [True]}}, bytes(4), "shape must be a list of sizes"),
    "huge size": ({"a": {**ENTRY, "shape": [2**62, 2**62]}}, bytes(4), "less than 2^63 bits"),
    "one offset": ({"a": {**ENTRY, "data_offsets": [0]}}, bytes(4), "data_offsets must be two positions"),
    "negative offset": ({"a": {**ENTRY, "data_offsets": [-4, 0]}}, bytes(4), "data_offsets must be two positions"),
    "backwards": ({"a": {**ENTRY, "data_offsets": [4, 0]}}, bytes(4), "data_offsets must span 4 bytes"),
    "short span": ({"a": {**ENTRY, "data_offsets": [0, 3]}}, bytes(4), "data_offsets must span 4 bytes for U8 (4,)"),
    "beyond the end": ({"a": ENTRY}, bytes(3), "is truncated: tensor a ends at byte"),
    "overlap": (
        {"a": ENTRY, "b": {**ENTRY, "data_offsets": [2, 6]}},
        bytes(6),
        "tensor b shares bytes with tensor a",
    ),
    "twice": (
        b'{"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}, "a": {}}',
        b"",
        "tensor a appears twice in the header",
    ),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_bad_header(tmp_path, case):
    header, data, text = BAD_HEADERS[case]
    file = raw_file(tmp_path, header, data)
    refuses(tmp_path, str(file), text)


@pytest.mark.parametrize(
    ("length", "text"), [(10**9, "header length must be at most"), (99, "is truncated: the header needs 99 bytes")]
)
def test_bad_header_length(tmp_path, length, text):
    refuses(raw_file(tmp_path, {}, length=length), text)


@pytest.mark.parametrize("size", [0, 7, 8, 100, -1])
def test_truncated_file(tmp_path, size):
    folder = copied(tmp_path, NAME)
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:size])
    refuses(folder, str(file), "is truncated")


def test_file_that_shrinks_after_it_was_opened(tmp_path):
    folder = copied(tmp_path, NAME)
    layers = load_experts(folder, None)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:60_000])
    with pytest.raises(CheckpointError, match=r"is truncated: tensor model\.layers\..* needs \d+ bytes, got \d+"):
        list(layers)


def test_tensor_in_two_shards(tmp_path):
    folder = copied(tmp_path, SHARDED)
    first, second = folder / "model-00001-of-00003.safetensors", folder / "model-00003-of-00003.safetensors"
    second.write_bytes(first.read_bytes())
    refuses(folder, str(second), "is in", str(first), layer=1)


def test_shard_is_missing(tmp_path):
    folder = copied(tmp_path, SHARDED)
    (folder / "model-00002-of-00003.safetensors").unlink()
    refuses(folder, "model-00002-of-00003.safetensors: shard is missing", "promises tensor model.layers.", layer=1)


def test_index_promises_what_no_shard_holds(tmp_path):
    folder = copied(tmp_path, SHARDED)
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["ghost"] = "model-00002-of-00003.safetensors"
    file.write_text(json.dumps(index))
    refuses(folder, "tensor ghost must be in model-00002-of-00003.safetensors", layer=1)


@pytest.mark.parametrize("shard", ["../model.safetensors", "/model.safetensors", "model.bin", 3])
def test_index_points_elsewhere(tmp_path, shard):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    refuses(tmp_path, "tensor a: shard must be a .safetensors file name", repr(shard))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_index_is_no_index(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    refuses(tmp_path, "model.safetensors.index.json")


@pytest.mark.parametrize("file", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "model.ckpt"])
def test_pickles_are_refused(tmp_path, file):
    (tmp_path / file).write_bytes(b"cos\nsystem\n")
    refuses(tmp_path, "only safetensors files are read", file)
    refuses(tmp_path / file, "only safetensors files are read", file)


def test_no_such_path(tmp_path):
    refuses(tmp_path / "nothing", "no such file or folder")
    refuses(tmp_path, "must be a .safetensors file or a folder with model.safetensors")


def test_bad_config(tmp_path):
    folder = copied(tmp_path, NAME)
    (folder / "config.json").write_text("{")
    refuses(folder, "config.json: must be a JSON object")


def test_layer_without_experts_lists_those_that_have_them(tmp_path):
    refuses(FIXTURES / SHARDED, "layer 0 has no experts; layers with experts: [1]", layer=0)
    refuses(FIXTURES / NAME, "layer 7 has no experts; layers with experts: [0, 1]", layer=7)
    refuses(write(tmp_path, {"model.layers.0.mlp.gate_proj.weight": torch.zeros(2, 2)}), "no layer has experts")
    refuses(tmp_path, "no layer has experts", layer=None)


@pytest.mark.parametrize("layer", ["0", 1.0, True])
def test_layer_type(layer):
    with pytest.raises(TypeError, match="layer must be an int or None"):
        load_experts(FIXTURES / NAME, layer)


def remove(pattern: str):
    def change(tensors):
        gone = [name for name in tensors if re.search(pattern, name)]
        assert gone
        for name in gone:
            del tensors[name]

    return change


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        (r"layers\.0\..*experts\.3\.", ("expert 3 is missing", ROOT)),
        (r"layers\.0\..*experts\.7\.", ("expert 7 is missing", "config.json says 8, the files hold 7")),
        (r"layers\.0\..*experts\.2\.up_proj\.", ("expert 2: up is missing", ROOT)),
        (r"layers\.0\..*experts\.2\.down_proj\.", ("expert 2: down is missing", ROOT)),
        (r"layers\.0\..*down_proj\.", ("expert 0: down is missing",)),
        (r"0\..*experts\.2\.up_proj\.weight_scale$", ("expert 2, up: tensor weight_scale is missing",)),
        (r"0\..*experts\.4\.down_proj\.weight_scale_2$", ("expert 4, down: tensor weight_scale_2 is missing",)),
        (r"0\..*experts\.5\.gate_proj\.input_scale$", ("expert 5, gate: tensor input_scale is missing",)),
        (r"0\..*experts\.6\.gate_proj\.weight$", ("expert 6, gate: tensor weight is missing",)),
        (r"0\..*\.weight_scale_2$", ("expert 0", "tensor weight_scale_2 is missing")),
    ],
)
def test_something_is_missing(tmp_path, pattern, texts):
    refuses(changed(tmp_path, NAME, remove(pattern)), *texts)


@pytest.mark.parametrize(
    ("name", "value", "texts"),
    [
        (f"{ROOT}.3.up_proj.weight", torch.zeros(48, 32), ("expert 3, up", "dtype U8, got F32")),
        (f"{ROOT}.3.up_proj.weight_scale", torch.zeros(48, 4), ("expert 3, up", "dtype F8_E4M3, got F32")),
        (f"{ROOT}.3.up_proj.weight_scale_2", torch.tensor(1), ("expert 3, up", "F32", "got I64")),
        (
            f"{ROOT}.3.up_proj.weight",
            torch.zeros(48, 31).byte(),
            ("expert 3, up", "(48, 32) like that of expert 0, got (48, 31)"),
        ),
        (f"{ROOT}.3.up_proj.weight", torch.zeros(48).byte(), ("expert 3, up", "like that of expert 0, got (48,)")),
        (f"{ROOT}.3.up_proj.weight_scale_2", torch.zeros(2), ("expert 3, up", "one element, got (2,)")),
        (f"{ROOT}.3.surprise", torch.zeros(2), ("unused tensor", f"{ROOT}.3.surprise")),
        (f"{ROOT}.3.up_proj.surprise", torch.zeros(2), ("unused tensor", f"{ROOT}.3.up_proj.surprise")),
        (f"{ROOT}.8.up_proj.weight", torch.zeros(2), ("expert 8", "gate is missing")),
        (f"{ROOT}.3.up_proj.pre_quant_scale", torch.ones(64), ("unused tensor", "per input channel")),
    ],
)
def test_something_is_wrong(tmp_path, name, value, texts):
    refuses(changed(tmp_path, NAME, lambda tensors: tensors.update({name: value})), *texts)


@pytest.mark.parametrize("projection", ["up_proj", "down_proj"])
def test_bias_of_one_expert_is_lost(tmp_path, projection):
    shapes = {"gate_proj": (4, 6), "up_proj": (4, 6), "down_proj": (6, 4)}
    tensors = {f"{ROOT}.{e}.{p}.weight": torch.ones(s) for e in range(3) for p, s in shapes.items()}
    tensors |= {f"{ROOT}.{e}.{p}.bias": torch.ones(s[0]) for e in range(3) for p, s in shapes.items()}
    assert load_experts(write(tmp_path, tensors), 0).w13_bias is not None
    del tensors[f"{ROOT}.1.{projection}.bias"]
    refuses(write(tmp_path, tensors), f"expert 1, {projection[:-5]}: tensor bias is missing")


def test_expert_of_another_size(tmp_path):
    def change(tensors):
        for part, columns in (("weight", 32), ("weight_scale", 4)):
            name = f"{ROOT}.3.up_proj.{part}"
            tensors[name] = tensors[name][:32, :columns].clone()

    refuses(changed(tmp_path, NAME, change), "expert 3, up", f"{ROOT}.3.up_proj.weight", "(48, 32)", "(32, 32)")


def test_hidden_size_that_does_not_fit_down(tmp_path):
    def change(tensors):
        for name in tensors:
            if ".experts." in name and "down_proj.weight" in name and tensors[name].ndim == 2:
                tensors[name] = tensors[name][:48].clone()

    refuses(changed(tmp_path, NAME, change), "w13 must have K = hidden_size = 48", f"{NAME} layer 0")


def test_fused_shapes_that_do_not_fit(tmp_path):
    name = "gpt_oss_modelopt_nvfp4"
    key = "model.layers.0.mlp.experts.down_proj"
    folder = changed(tmp_path, name, lambda t: t.update({key: t[key][:, :, :48].clone()}))
    refuses(folder, "shapes of gate_up (32, 160) and down (40, 48) do not fit each other")


def test_fused_tensor_of_fewer_experts(tmp_path):
    name = "gpt_oss_modelopt_nvfp4"
    key = "model.layers.0.mlp.experts.down_proj_weight_scale"
    folder = changed(tmp_path, name, lambda t: t.update({key: t[key][:3].clone()}))
    refuses(folder, key, "have 4 experts in its first dimension, got (3, 5, 64)")


def test_two_names_for_one_part(tmp_path):
    name = f"{ROOT}.3.up_proj"
    folder = changed(tmp_path, NAME, lambda t: t.update({f"{name}.scale": t[f"{name}.weight_scale"].clone()}))
    refuses(folder, f"{name}.scale", f"{name}.weight_scale", "the same part")


def test_two_expert_modules_in_one_layer(tmp_path):
    def change(tensors):
        for name in [name for name in tensors if name.startswith(ROOT)]:
            tensors[name.replace("model.", "draft.", 1)] = tensors[name].clone()

    refuses(changed(tmp_path, NAME, change), "layer 0 is ambiguous", "draft.layers.0.mlp.experts")


def test_unknown_format(tmp_path):
    experts = {
        f"{ROOT}.0.{p}_proj.{part}": torch.zeros(16, 16, dtype=dtype)
        for p in ("gate", "up", "down")
        for part, dtype in (("weight", torch.uint8), ("weight_scale", torch.bfloat16))
    }
    refuses(write(tmp_path, experts), "no known format stores a weight as", "weight_scale BF16 (16, 16)")


@pytest.mark.parametrize("name", ["rotary_emb.inv_freq", "mlp.experts.3.up_proj.weight_quantizer._amax", "x.k_scale"])
def test_leftovers_are_ignored(tmp_path, name):
    folder = changed(tmp_path, NAME, lambda t: t.update({f"model.layers.0.{name}": torch.zeros(2)}))
    assert load_experts(folder, 0).equal(load_experts_like(folder))


@pytest.mark.parametrize("source", ["\x00", "\x1b[2J", "\ud800", "a" * 100_000])
def test_what_a_saved_file_says_of_its_source_is_shown_as_text(tmp_path, source):
    raw = load_experts(changed(tmp_path, NAME, lambda t: None), 0)
    with pytest.raises(ValueError, match="RawWeights: w2 must have 3 dimensions") as error:
        type(raw)(**{**vars(raw), "source": source, "w2": raw.w2[0]})
    text = str(error.value)
    assert text.isprintable() and len(text) < 6000 and (source[0] == "a" or ascii(source) in text)


def load_experts_like(folder: Path):
    """The untouched fixture, as if it lay in `folder`."""
    clean = write(folder.parent / "clean" / folder.name, stored(folder.name), config_of(folder.name))
    raw = load_experts(clean, 0)
    return type(raw)(**{**vars(raw), "source": f"{folder} layer 0"})
