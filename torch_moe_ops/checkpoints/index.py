"""Open a checkpoint: every tensor of a folder or file by name, without reading data."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch_moe_ops.checkpoints.errors import CheckpointError
from torch_moe_ops.checkpoints.header import TensorEntry, read_header
from torch_moe_ops.checkpoints.model_config import ModelConfig, parse_config
from torch_moe_ops.checkpoints.naming import ExpertLayer, find_layers

SINGLE_FILE = "model.safetensors"
SHARD_INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_CACHE_SIZE = 4


@dataclass(frozen=True)
class CheckpointIndex:
    """What a checkpoint holds.

    Args:
        path: folder or file as it was given.
        entries: every tensor by its full name.
        config: config.json, {} where there is none.
        quant_config: hf_quant_config.json (older ModelOpt exports say their format only there), {} where there is none.
    """

    path: str
    entries: dict[str, TensorEntry]
    config: dict[str, Any]
    quant_config: dict[str, Any]

    @cached_property
    def model(self) -> ModelConfig:
        """What the config files say about the experts."""
        return parse_config(self.config, self.quant_config)

    @cached_property
    def layers(self) -> list[ExpertLayer]:
        """Every layer with experts. Found once: a large model has hundreds of thousands of names."""
        return find_layers(self.entries, self.model.num_hidden_layers)


_cache: OrderedDict[str, tuple[tuple[tuple[str, int, int], ...], CheckpointIndex]] = OrderedDict()


def open_checkpoint(path: str | os.PathLike[str]) -> CheckpointIndex:
    """Index of a checkpoint: a folder with model.safetensors or shards and their index, or one .safetensors file.

    The last few are kept, and read again once a file's time or size has changed.

    Raises:
        CheckpointError: naming the file and, where one is at fault, the tensor.
    """
    path = os.fspath(path)
    folder, shards, weight_map = _locate(path)
    key = os.path.abspath(path)
    stamp = _stamp([*shards, *(os.path.join(folder, n) for n in (SHARD_INDEX, "config.json", "hf_quant_config.json"))])
    if key in _cache and _cache[key][0] == stamp:
        _cache.move_to_end(key)
        return _cache[key][1]
    index = CheckpointIndex(
        path,
        _merge(shards, weight_map),
        _optional_json(os.path.join(folder, "config.json")),
        _optional_json(os.path.join(folder, "hf_quant_config.json")),
    )
    _cache[key] = (stamp, index)
    while len(_cache) > _CACHE_SIZE:
        _cache.popitem(last=False)
    return index


def _stamp(files: Iterable[str]) -> tuple[tuple[str, int, int], ...]:
    stamps = []
    for file in files:
        try:
            status = os.stat(file)
            stamps.append((file, status.st_mtime_ns, status.st_size))
        except OSError:
            stamps.append((file, 0, -1))
    return tuple(stamps)


def _locate(path: str) -> tuple[str, list[str], dict[str, str]]:
    """Folder, safetensors files, and which file the shard index promises for each tensor ({}: no index)."""
    if os.path.isfile(path):
        if not path.endswith(".safetensors"):
            raise CheckpointError(f"{path}: {_refusal([os.path.basename(path)])}")
        return os.path.dirname(path), [path], {}
    if not os.path.isdir(path):
        raise CheckpointError(f"{path}: no such file or folder")
    names = sorted(os.listdir(path))
    if SINGLE_FILE in names:
        return path, [os.path.join(path, SINGLE_FILE)], {}
    if SHARD_INDEX in names:
        return _shards(path)
    files = [name for name in names if name.endswith(".safetensors")]
    if len(files) == 1:
        return path, [os.path.join(path, files[0])], {}
    if files:
        raise CheckpointError(f"{path}: must hold {SINGLE_FILE} or {SHARD_INDEX}, got {files[:8]}")
    raise CheckpointError(f"{path}: {_refusal(names)}")


def _refusal(names: list[str]) -> str:
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        return (
            f"only safetensors files are read, got {pickles[:4]}. Pickle files can run code when they are loaded: "
            "convert them to safetensors first"
        )
    return f"must be a .safetensors file or a folder with {SINGLE_FILE} or {SHARD_INDEX}, got {names[:8]}"


def _shards(folder: str) -> tuple[str, list[str], dict[str, str]]:
    file = os.path.join(folder, SHARD_INDEX)
    weight_map = _optional_json(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file}: weight_map must be an object of tensor names, got {type(weight_map).__name__}")
    for name, shard in weight_map.items():
        # A name with a folder in it could point anywhere on the machine.
        if not isinstance(shard, str) or os.path.basename(shard) != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(f"{file}: tensor {name}: shard must be a .safetensors file name, got {shard!r}")
    shards = [os.path.join(folder, shard) for shard in sorted(set(weight_map.values()))]
    missing = [shard for shard in shards if not os.path.isfile(shard)]
    if missing:
        shard = os.path.basename(missing[0])
        name = next(name for name, value in weight_map.items() if value == shard)
        raise CheckpointError(f"{missing[0]}: shard is missing; {SHARD_INDEX} promises tensor {name} in it")
    return folder, shards, weight_map


def _merge(shards: list[str], weight_map: dict[str, str]) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    for shard in shards:
        found = read_header(shard)
        twice = next((name for name in found if name in entries), None)
        if twice is not None:
            raise CheckpointError(f"{shard}: tensor {twice} is in {entries[twice].file} as well")
        entries.update(found)
    for name, shard in weight_map.items():
        if name not in entries or os.path.basename(entries[name].file) != shard:
            where = f", it is in {entries[name].file}" if name in entries else ""
            raise CheckpointError(f"{SHARD_INDEX}: tensor {name} must be in {shard}, which does not hold it{where}")
    return entries


def _optional_json(file: str) -> dict[str, Any]:
    if not os.path.exists(file):
        return {}
    try:
        with open(file, encoding="utf-8") as stream:
            value = json.load(stream)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: must be a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: must be a JSON object, got {type(value).__name__}")
    return value
