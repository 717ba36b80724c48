"""Files of raw and prepared weights that say something odd: one kind of error, which names the file and the field."""

from __future__ import annotations

import dataclasses
import json
import os
import struct
import urllib.parse
from pathlib import Path
from typing import Any

import pytest
import torch
from every_layer import layer_of, prepared_here, raw_of
from problems import Case, make_raw

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.checkpoints import CheckpointError
from torch_moe_ops.core.schemes import SCHEMES

CASE = Case(act_format="nvfp4", input_scale="expert", bias=True, per_half=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    folder = tmp_path_factory.mktemp("saved")
    raw = make_raw(CASE)
    moe.prepare(raw, backend="reference", act_format="nvfp4").save(folder / "prepared")
    raw.save(folder / "raw")
    return (folder / "prepared").read_bytes(), (folder / "raw").read_bytes()


def split(content: bytes) -> tuple[dict[str, Any], bytes]:
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def join(header: dict[str, Any], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def with_plain(content: bytes, **changes: Any) -> bytes:
    """The file with other plain values; `...` removes one."""
    header, data = split(content)
    plain = json.loads(header["__metadata__"]["moeq"]) | changes
    header["__metadata__"]["moeq"] = json.dumps({name: value for name, value in plain.items() if value is not ...})
    return join(header, data)


def refused(folder: Path, content: bytes, *texts: str, kind: Any = moe.PreparedWeights) -> None:
    path = folder / "layer.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        kind.load(path)
    for text in (str(path), *texts):
        assert text in str(caught.value), str(caught.value)
    assert len(str(caught.value)) < 1500


ODD: list[tuple[str, Any, str]] = [
    ("backend", 3, "backend must be str, got 3"),
    ("backend", [], "backend must be str, got []"),
    ("backend", "none", "backend must be one of "),
    ("scheme", "nvfp5", "scheme must be one of ["),
    ("scheme", {}, "scheme must be str"),
    ("scheme", "mxfp4", "must"),
    ("layout", None, "layout must be str, got None"),
    ("layout", "linear_v0", "layout must be 'linear_v1' for backend 'reference', got 'linear_v0'"),
    ("activation", "nonsense", "activation must be one of"),
    ("activation", None, "activation must be str"),
    ("activation", "relu2_no_mul", "w13 must have shape"),
    ("act_format", "int8", "act_format must be one of"),
    ("act_format", "nonsense", "act_format must be one of"),
    ("act_format", "none", "a1_gscale must be None"),
    ("weight_policy", "folded", "weight_policy must be one of ['exact']"),
    ("weight_policy", "exact" + "9" * 100_000, "weight_policy must be one of ['exact']"),
    ("num_experts", "4", "num_experts must be int, got '4'"),
    ("num_experts", 4.0, "num_experts must be int"),
    ("num_experts", True, "num_experts must be int"),
    ("num_experts", 3, "num_experts must"),
    ("num_experts", 10**30, "num_experts must be int"),
    ("num_experts", 2**40, "num_experts must be in 1..2147483647"),
    ("num_local_experts", 0, "num_local_experts must be in 1.."),
    ("num_local_experts", 5, "w13 must have shape"),
    ("local_expert_offset", -1, "local_expert_offset must be in 0.."),
    ("local_expert_offset", 1, "num_experts must"),
    ("hidden_size", 65, "hidden_size must be in 1..2147483647 and a multiple of 16"),
    ("hidden_size", 128, "w13 must have shape"),
    ("intermediate_size", 0, "intermediate_size must be in"),
    ("router_weight_on_input", 1, "router_weight_on_input must be bool"),
    ("swiglu_alpha", 2.0, "swiglu_alpha must"),
    ("swiglu_beta", "1", "swiglu_beta must be float | None, got '1'"),
    ("swiglu_limit", -1.0, "swiglu_limit must be positive"),
    ("swiglu_limit", float("nan"), "swiglu_limit must be float | None, got nan"),
    ("swiglu_limit", 10**400, "an integer must have at most 308 digits"),
    ("raw", "%7B%7D", "raw must be what prepare writes"),
    ("raw", "nonsense", "raw must be what prepare writes"),
    ("raw", None, "raw must be str"),
    ("posed", "%7B%7D", "posed must be what prepare writes"),
    ("posed", "[]", "posed must be what prepare writes"),
    ("posed", 1, "posed must be str"),
    ("w13", [1], "unknown ['w13']"),
    ("w2_bias", 0, "unknown ['w2_bias']"),
    ("surprise", 1, "unknown ['surprise']"),
    *((name, ..., f"missing ['{name}']") for name in ("backend", "scheme", "hidden_size", "swiglu_limit")),
]


@pytest.mark.parametrize(("name", "value", "text"), ODD, ids=lambda value: str(value)[:40])
def test_plain_values(tmp_path: Path, saved: tuple[bytes, bytes], name: str, value: Any, text: str) -> None:
    refused(tmp_path, with_plain(saved[0], **{name: value}), text)


NOTES: list[tuple[str, str, Any]] = [
    *(("raw", "activation", value) for value in (3, "nonsense", ...)),
    *(("raw", "swiglu_limit", value) for value in ("7", float("nan"))),
    *(("raw", "w13_bias_dtype", value) for value in ("nonsense", "int8", "nn", "Tensor", None, 1)),
    ("raw", "source", None),
    ("raw", "surprise", 1),
    *(("posed", "requested", value) for value in ("nonsense", None, ["auto"])),
    *(("posed", "has_bias", value) for value in ("yes", 1, None)),
    *(("posed", "constants", value) for value in (1, [1.0], [1.0, 2.0, "3"], [1.0, 2.0, float("nan")])),
    *(("posed", "dtype", value) for value in ("nonsense", "int8", 5)),
    *(("posed", "input_scale", value) for value in ("nonsense", 1)),
    *(("posed", "top_k", value) for value in ("2", 2.5)),
    ("posed", "weight_scales", []),
    ("posed", "surprise", 1),
]


@pytest.mark.parametrize(("field", "name", "value"), NOTES)
def test_values_in_notes(tmp_path: Path, saved: tuple[bytes, bytes], field: str, name: str, value: Any) -> None:
    plain = json.loads(split(saved[0])[0]["__metadata__"]["moeq"])
    notes = json.loads(urllib.parse.unquote(plain[field])) | {name: value}
    notes = {key: value for key, value in notes.items() if value is not ...}
    text = "what prepare writes" if name == "surprise" or value is ... else name.removesuffix("_dtype")
    refused(tmp_path, with_plain(saved[0], **{field: urllib.parse.quote(json.dumps(notes))}), text, "must be")


@pytest.mark.parametrize("metadata", [None, [], {}, {"moeq_format": "2"}, {"moeq_format": 1}, {"moeq_format": ["1"]}])
def test_version(tmp_path: Path, saved: tuple[bytes, bytes], metadata: Any) -> None:
    header, data = split(saved[0])
    header["__metadata__"] = metadata
    refused(tmp_path, join(header, data), "must be")


@pytest.mark.parametrize(
    "text", [None, 3, "", "{", "[]", "1", "null", "[" * 100_000, '{"a": "\ud800"}', '{"scheme": NaN}']
)
def test_text_of_the_plain_values(tmp_path: Path, saved: tuple[bytes, bytes], text: Any) -> None:
    header, data = split(saved[0])
    header["__metadata__"]["moeq"] = text
    for kind in (moe.PreparedWeights, moe.RawWeights):
        refused(tmp_path, join(header, data), "layer.safetensors: ", kind=kind)


@pytest.mark.parametrize("scheme", ["nvfp4", "int4", "none"])
def test_every_tensor_in_another_dtype_shape_or_missing(tmp_path: Path, scheme: str) -> None:
    case = dataclasses.replace(CASE, scheme=scheme, act_format="nvfp4" if scheme == "nvfp4" else "none")
    raw = make_raw(case)
    if scheme == "int4":
        points = {n: torch.full(getattr(raw, n).shape, 7, dtype=torch.uint8) for n in ("w13_scale", "w2_scale")}
        raw = dataclasses.replace(raw, **{n.replace("scale", "zero_point"): t for n, t in points.items()})
    moe.prepare(raw, backend="reference", act_format=case.act_format).save(tmp_path / "good")
    moe.PreparedWeights.load(tmp_path / "good")
    header, data = split((tmp_path / "good").read_bytes())
    optional = {"a1_gscale", "a2_gscale", "a13_input_scale", "a2_input_scale", "w13_zero_point", "w2_zero_point"}
    changed = 0
    for name in (name for name in header if name != "__metadata__"):
        for change in ({"dtype": "C64"}, {"dtype": "F64"}, {"shape": "flat"}, {"shape": "longer"}, None):
            damaged = json.loads(json.dumps(header))
            entry = damaged.pop(name)
            if change is None and name in optional:
                continue
            if change is not None:
                size = entry["data_offsets"][1] - entry["data_offsets"][0]
                shape = {"flat": [size // 4, 1, 1, 1], "longer": [1, *entry["shape"]]}.get(change.get("shape", ""))
                width = {"C64": 8, "F64": 8}.get(change.get("dtype", ""))
                if shape is not None:
                    entry["shape"] = shape if change["shape"] == "longer" else [size]
                    entry["dtype"] = entry["dtype"] if change["shape"] == "longer" else "U8"
                elif size % width:
                    continue
                else:
                    entry.update(dtype=change["dtype"], shape=[size // width])
                damaged[name] = entry
                refused(tmp_path, join(damaged, data), name)
            else:
                start, end = entry["data_offsets"]
                for other in damaged.values():
                    if other.get("data_offsets", [0])[0] >= end:
                        other["data_offsets"] = [offset - (end - start) for offset in other["data_offsets"]]
                refused(tmp_path, join(damaged, data[:start] + data[end:]), name.removesuffix("_dtype"))
            changed += 1
    assert changed > 20


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", ["FIFO", "folder", "nothing", "link"])
def test_only_regular_files(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "layer.safetensors"
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("/dev/zero")
    for loaded in (moe.PreparedWeights, moe.RawWeights):
        with pytest.raises(CheckpointError, match=r"must be a regular file, is a|cannot be read: No such file"):
            loaded.load(path)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("scheme", "nvfp5", "scheme must be one of"),
        ("scheme", [], "scheme must be str"),
        ("activation", [], "activation must be str | None"),
        ("activation", "nonsense", "activation must be None or one of"),
        ("swiglu_limit", "7", "swiglu_limit must be float | None"),
        ("swiglu_limit", -1, "swiglu_limit must be positive"),
        ("swiglu_limit", True, "swiglu_limit must be float | None"),
        ("source", 1, "source must be str"),
        ("w13_scale", [], "unknown ['w13_scale']"),
        ("w13", None, "unknown ['w13']"),
    ],
)
def test_raw_weights(tmp_path: Path, saved: tuple[bytes, bytes], name: str, value: Any, text: str) -> None:
    refused(tmp_path, with_plain(saved[1], **{name: value}), text, kind=moe.RawWeights)


@pytest.mark.parametrize("value", [10**400, -(10**400), float("nan")])
def test_raw_weights_of_numbers_that_no_float_has(value: float) -> None:
    for name in ("swiglu_alpha", "swiglu_beta", "swiglu_limit"):
        with pytest.raises(ValueError, match=f"RawWeights: {name} must be None or a number that float64 has"):
            dataclasses.replace(make_raw(Case()), **{name: value})


def test_integers_for_numbers(tmp_path: Path, saved: tuple[bytes, bytes]) -> None:
    path = tmp_path / "layer.safetensors"
    path.write_bytes(with_plain(saved[0], swiglu_limit=7))
    loaded = moe.PreparedWeights.load(path)
    assert loaded.swiglu_limit == 7 and isinstance(loaded.swiglu_limit, float)


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_what_prepare_writes_loads(backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for layer in [layer for scheme in SCHEMES if (layer := layer_of(backend, scheme))]:
        w = prepared_here(backend, layer[0], raw_of(*layer), monkeypatch)
        w.save(tmp_path / "layer.safetensors")
        again = moe.PreparedWeights.load(tmp_path / "layer.safetensors")
        assert again.metadata() == w.metadata() and again.tensors().keys() == w.tensors().keys()
        for name, tensor in w.tensors().items():
            assert torch.equal(again.tensors()[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8))
