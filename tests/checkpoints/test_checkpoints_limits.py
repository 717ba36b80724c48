"""Files made to take for ever, or all memory: an error at once. Every limit is stated in docs/design.md."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints_support import FIXTURES, copied, cpu_limit, raw_file, write
from paths import ROOT as TREE

from torch_moe_ops.checkpoints import CheckpointError, index, layer, load_experts
from torch_moe_ops.checkpoints.naming import find_layers
from torch_moe_ops.files import header, limits
from torch_moe_ops.files import reading as files

NAME = "qwen3_moe_modelopt_nvfp4"
SHARDED = "deepseek_v3_modelopt_nvfp4"
ROOT = "model.layers.0.mlp.experts"
EMPTY = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}


def refuses(path: Path, *texts: str, seconds: float = 2.0):
    with cpu_limit(seconds), pytest.raises(CheckpointError) as caught:
        list(load_experts(path, None))
    for text in texts:
        assert text in str(caught.value), str(caught.value)
    assert len(str(caught.value)) < 1200


def test_a_thousand_billion_experts_in_a_few_bytes(tmp_path):
    entry = {"dtype": "BF16", "shape": [10**12, 0, 8], "data_offsets": [0, 0]}
    names = [f"{ROOT}.{p}" for p in ("gate_up_proj", "down_proj")]
    file = raw_file(tmp_path, dict.fromkeys(names, entry))
    assert file.stat().st_size < 300
    refuses(tmp_path, f"tensor {names[0]} (expert 0, gate_up) must have dimensions", "(1000000000000, 0, 8)")


@pytest.mark.parametrize("part", [0, 1, 2])
def test_experts_without_elements(tmp_path, part):
    shapes = {"gate_proj": (4, 6), "up_proj": (4, 6), "down_proj": (6, 4)}
    empty = list(shapes)[part]
    tensors = {f"{ROOT}.{e}.{p}.weight": torch.ones(s) for e in range(2) for p, s in shapes.items()}
    tensors.update({f"{ROOT}.{e}.{empty}.weight": torch.ones(0, 6) for e in range(2)})
    refuses(write(tmp_path, tensors), f"tensor {ROOT}.0.{empty}.weight", "must have elements, got (0, 6)")


def test_a_first_expert_larger_than_the_others(tmp_path):
    """Memory for all experts is taken at once: never for more than what the file holds."""
    tensors = {}
    for e in range(4000):
        for p in ("gate_proj", "up_proj", "down_proj"):
            tensors[f"{ROOT}.{e}.{p}.weight"] = torch.ones((1024, 1024) if e == 0 else (1, 1), dtype=torch.float16)
    write(tmp_path, tensors)
    refuses(tmp_path, f"{ROOT}.1.gate_proj.weight (expert 1, gate) must have shape (1024, 1024) like", seconds=5)


def test_a_name_of_many_layers(tmp_path):
    raw_file(tmp_path, {"layers.1." * 30_000 + "x.experts": EMPTY})
    refuses(tmp_path, "tensor names must have at most 512 characters, got 270009: layers.1.layers.1.")


def test_many_names_of_many_layers():
    """As long as names may be: each is read once, from left to right."""
    names = [f"{'layers.1.' * 54}{n}.experts" for n in range(20_000)]
    with cpu_limit(5):
        assert find_layers(names) == []


def test_many_sizes(tmp_path):
    raw_file(tmp_path, {"a": {"dtype": "U8", "shape": [2**62] * 14_000, "data_offsets": [0, 4]}}, bytes(4))
    refuses(tmp_path, "tensor a: shape must have at most 64 dimensions, got 14000")


@pytest.mark.parametrize("shape", [[2**62] * 64, [2**31, 2**31, 0], [2**60]])
def test_sizes_that_no_tensor_has(tmp_path, shape):
    raw_file(tmp_path, {"a": {"dtype": "U8", "shape": shape, "data_offsets": [0, 0]}})
    refuses(tmp_path, "tensor a: shape must have less than 2^63 bits")


def test_many_layers_beside_many_prediction_layers():
    names = [f"model.layers.{n}.mlp.experts.0.w1.weight" for n in range(20_000)]
    names += [f"model.layers.{n}.enorm.weight" for n in range(20_000, 40_000)]
    with cpu_limit(5):
        layers = find_layers(names)
    assert len(layers) == 20_000 and not any(found.mtp for found in layers)


def special(file: Path, kind: str) -> None:
    file.unlink(missing_ok=True)
    if kind == "FIFO":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "link to nothing":
        file.symlink_to(file.parent / "nowhere")
    else:
        file.symlink_to("/dev/zero")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["FIFO", "character device", "folder", "link to nothing"])
@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "hf_quant_config.json",
        "model.safetensors.index.json",
        "model-00002-of-00003.safetensors",
        "model.safetensors",
    ],
)
def test_only_regular_files(tmp_path, name, kind):
    folder = copied(tmp_path, NAME if name == "model.safetensors" else SHARDED)
    special(folder / name, kind)
    text = "missing" if kind.startswith("link") and name.startswith("model-") else "is a "
    text = "cannot be read: No such file" if kind.startswith("link") and not name.startswith("model-") else text
    refuses(folder, f"{folder / name}: ", text)
    if kind in ("FIFO", "character device"):
        refuses(folder, f"must be a regular file, is a {kind}")


def test_links_to_regular_files(tmp_path):
    """As the cache of a hub has them."""
    for file in (FIXTURES / NAME).iterdir():
        (tmp_path / file.name).symlink_to(file)
    assert load_experts(tmp_path, 0).num_experts == 8


def test_a_name_that_becomes_a_fifo_while_it_is_opened(tmp_path, monkeypatch):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    regular = os.stat(FIXTURES / NAME / "config.json")
    monkeypatch.setattr(files, "os", SimpleNamespace(**{**vars(os), "stat": lambda file: regular}))
    with pytest.raises(CheckpointError, match="must be a regular file, is a FIFO"):
        files.open_regular(str(fifo))


@pytest.mark.parametrize(
    ("name", "limit"),
    [("config.json", "MAX_CONFIG_BYTES"), ("model.safetensors.index.json", "MAX_INDEX_BYTES")],
)
def test_long_files(tmp_path, name, limit):
    folder = copied(tmp_path, SHARDED)
    size = getattr(limits, limit) + 1
    with open(folder / name, "r+b") as stream:
        stream.truncate(size)
    refuses(folder, f"{folder / name}: must have at most {size - 1} bytes, got {size}")


@pytest.mark.parametrize("open_, close", [(b"[", b"]"), (b'{"a":', b"}")])
def test_depth(tmp_path, open_, close):
    folder = copied(tmp_path, NAME)
    for depth, fits in ((limits.MAX_JSON_DEPTH, True), (limits.MAX_JSON_DEPTH + 1, False), (1_000_000, False)):
        value = open_ * (depth - 1) + b"1" + close * (depth - 1)
        (folder / "config.json").write_bytes(b'{"quoted \\\\\\" [[": ' + value + b"}")
        if fits:
            load_experts(folder, 0)
        else:
            refuses(
                folder,
                f"config.json: must be a JSON object: it must be at most 64 .* deep, got {depth}".replace(
                    " .*", " arrays and objects"
                ),
            )


def test_depth_where_the_interpreter_has_no_limit_of_its_own(tmp_path):
    raw_file(tmp_path, b"[" * 3_000_000)
    code = (
        "import sys; sys.setrecursionlimit(10**9); from torch_moe_ops.checkpoints import *\n"
        "try: load_experts(sys.argv[1], 0)\n"
        "except CheckpointError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "arrays and objects deep, got 3000000" in done.stdout


def test_long_numbers(tmp_path):
    entry = '{"a": {"dtype": "U8", "shape": [%s], "data_offsets": [0, 0]}}'
    raw_file(tmp_path, (entry % ("1" * 100_000)).encode())
    refuses(tmp_path, "header must be a JSON object: an integer must have at most 308 digits, got 100000")
    raw_file(tmp_path, (entry % ("1" * 308)).encode())
    refuses(tmp_path, "tensor a: shape must be a list of sizes, got [1111")


@pytest.mark.parametrize("name", ["a\x1b[2J", "a\n", "\ud800"])
def test_names_that_a_terminal_would_obey(tmp_path, name):
    raw_file(tmp_path, {name: EMPTY})
    refuses(tmp_path, f"tensor names must be printable, got {name!a}")


def test_counts(tmp_path, monkeypatch):
    """Limits that only large files reach, lowered."""
    folder = copied(tmp_path, NAME)
    monkeypatch.setattr(header, "MAX_TENSORS", 236)
    refuses(folder, "must hold at most 236 tensors, got 237")
    monkeypatch.setattr(files, "MAX_JSON_CONTAINERS", 711)
    refuses(folder, "it must hold at most 711 arrays and objects, got 71")
    monkeypatch.undo()
    monkeypatch.setattr(layer, "MAX_EXPERTS", 7)
    refuses(folder, f"{folder} layer 0: must have at most 7 experts, got 8")
    monkeypatch.setattr(index, "MAX_SHARDS", 2)
    refuses(FIXTURES / SHARDED, "index.json: must name at most 2 shards, got 3")


def test_experts_without_end(tmp_path):
    write(tmp_path, {f"{ROOT}.gate_up_proj": torch.ones(9000, 2, 1), f"{ROOT}.down_proj": torch.ones(9000, 1, 1)})
    refuses(tmp_path, "layer 0: must have at most 8192 experts, got 9000")


def test_limits_are_documented():
    text = (TREE / "docs" / "design.md").read_text().replace(",", "")
    for name, value in vars(limits).items():
        if name.startswith("MAX_"):
            assert re.search(rf"\b{value}\b", text), f"docs/design.md must state {name} = {value}"


def test_a_large_header_is_read_in_its_own_time(tmp_path):
    """Half a million tensors: seconds, most of them the JSON parser's."""
    entries = {f"t{n}": EMPTY for n in range(200_000)}
    raw_file(tmp_path, json.dumps(entries).encode())
    refuses(tmp_path, "no layer has experts", seconds=20)
