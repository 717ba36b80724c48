"""Open a checkpoint: every tensor of a folder or file by name, without reading data."""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Any

from torch_moe_ops.checkpoints.hub import is_repository, repository_folder
from torch_moe_ops.checkpoints.model_config import ModelConfig, parse_config
from torch_moe_ops.checkpoints.naming import ExpertLayer, NameConflict, find_layers
from torch_moe_ops.files.errors import CheckpointError, short
from torch_moe_ops.files.header import Header, TensorEntry, check_name, digest_of, read_header
from torch_moe_ops.files.index import FileIndex
from torch_moe_ops.files.limits import MAX_CONFIG_BYTES, MAX_INDEX_BYTES, MAX_SHARDS
from torch_moe_ops.files.reading import parse_object, read_all, unreadable

SINGLE_FILE = "model.safetensors"
SHARD_INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
QUANT_CONFIG = "hf_quant_config.json"
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_CACHE_SIZE = 4


@dataclass(frozen=True, kw_only=True)
class CheckpointIndex(FileIndex):
    """What a checkpoint holds.

    Args:
        config: config.json, {} where there is none.
        quant_config: hf_quant_config.json (older ModelOpt exports say their format only there), {} where there is none.
    """

    config: dict[str, Any]
    quant_config: dict[str, Any]

    def forget(self) -> None:
        """Read the files again at the next `open_checkpoint`."""
        forget(self.path)

    @cached_property
    def model(self) -> ModelConfig:
        """What the config files say about the experts; CheckpointError where they contradict themselves."""
        folder = self.path if os.path.isdir(self.path) else os.path.dirname(self.path)
        return parse_config(self.config, self.quant_config, os.path.join(folder, CONFIG))

    @cached_property
    def layers(self) -> list[ExpertLayer]:
        """Every layer with experts. Found once: a large model has hundreds of thousands of names."""
        try:
            return find_layers(self.entries, self.model.num_hidden_layers)
        except NameConflict as error:
            raise CheckpointError(f"{self.path}: {error}") from error


@dataclass(frozen=True)
class _Kept:
    """An index, and what must still hold for it: texts of the small files, stamps of those with tensors."""

    texts: tuple[bytes | None, ...]
    stamps: tuple[tuple[int, ...], ...]
    index: CheckpointIndex


_cache: OrderedDict[str, _Kept] = OrderedDict()
_cache_lock = Lock()


def open_checkpoint(path: str | os.PathLike[str]) -> CheckpointIndex:
    """Index of a checkpoint: a folder with model.safetensors or shards and their index, or one .safetensors file.

    A name such as "org/name" or "org/name@revision" that is nothing here is a repository of the Hugging Face Hub.

    The last few are kept, and read again once a file is another one (the small ones by their text, those with
    tensors by inode, times and size). A change that those do not tell is TensorReader's to find.

    Raises:
        CheckpointError: naming the file and, where one is at fault, the tensor.
    """
    path = os.fsdecode(path)
    if is_repository(path):
        path = repository_folder(path)
    folder, file = _locate(path)
    is_sharded = not file.endswith(".safetensors")
    config, quant_config = (os.path.join(folder, name) for name in (CONFIG, QUANT_CONFIG))
    texts = [_optional_text(config), _optional_text(quant_config)]
    promises = read_all(file, MAX_INDEX_BYTES) if is_sharded else b""
    digests = (os.fsencode(file), *(text and digest_of(text) for text in (*texts, promises)))
    key = os.path.abspath(path)
    kept = _cache.get(key)
    if kept and kept.texts == digests and kept.stamps == tuple(map(_stamp, kept.index.digests)):
        _keep(key, kept)
        return kept.index
    weight_map = _weight_map(file, promises) if is_sharded else {}
    shards = _shards(file, weight_map) if is_sharded else [file]
    stamps = tuple(map(_stamp, shards))
    headers = {shard: read_header(shard) for shard in shards}
    index = CheckpointIndex(
        path=path,
        entries=_merge(headers, weight_map, file),
        digests={shard: header.digest for shard, header in headers.items()},
        config=_optional_object(texts[0], config),
        quant_config=_optional_object(texts[1], quant_config),
    )
    _keep(key, _Kept(digests, stamps, index))
    return index


def _keep(key: str, kept: _Kept) -> None:
    with _cache_lock:
        _cache[key] = kept
        _cache.move_to_end(key)
        while len(_cache) > _CACHE_SIZE:
            _cache.popitem(last=False)


def forget(path: str) -> None:
    """Read the files of `path` again at the next `open_checkpoint`."""
    with _cache_lock:
        _cache.pop(os.path.abspath(path), None)


def _stamp(file: str) -> tuple[int, ...]:
    try:
        status = os.stat(file)
    except OSError as error:
        raise unreadable(file, error) from error
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size


def _locate(path: str) -> tuple[str, str]:
    """Folder, and the one file with tensors, or the shard index."""
    if os.path.isfile(path):
        if not path.endswith(".safetensors"):
            raise CheckpointError(f"{path}: {_refusal([os.path.basename(path)])}")
        return os.path.dirname(path), path
    if not os.path.isdir(path):
        raise CheckpointError(f"{path}: no such file or folder")
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise unreadable(path, error) from error
    for name in (SINGLE_FILE, SHARD_INDEX):
        if name in names:
            return path, os.path.join(path, name)
    files = [name for name in names if name.endswith(".safetensors")]
    if len(files) == 1:
        return path, os.path.join(path, files[0])
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


def _weight_map(file: str, text: bytes) -> dict[str, str]:
    """Which shard the index promises for each tensor."""
    weight_map = parse_object(text, file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file}: weight_map must be an object of tensor names, got {type(weight_map).__name__}")
    for name, shard in weight_map.items():
        check_name(file, name)
        # A name with a folder in it could point anywhere on the machine.
        if not isinstance(shard, str) or os.path.basename(shard) != shard or not shard.endswith(".safetensors"):
            got = short(repr(shard))
            raise CheckpointError(f"{file}: tensor {name}: shard must be a .safetensors file name, got {got}")
    return weight_map


def _shards(file: str, weight_map: dict[str, str]) -> list[str]:
    """The files that the index names."""
    first = {shard: name for name, shard in reversed(weight_map.items())}
    if len(first) > MAX_SHARDS:
        raise CheckpointError(f"{file}: must name at most {MAX_SHARDS} shards, got {len(first)}")
    for shard in first:
        check_name(file, shard, "shard")
    shards = {os.path.join(os.path.dirname(file), shard): name for shard, name in sorted(first.items())}
    for shard, name in shards.items():
        if not os.path.exists(shard):
            raise CheckpointError(f"{shard}: shard is missing; {SHARD_INDEX} promises tensor {name} in it")
    return list(shards)


def _merge(headers: dict[str, Header], weight_map: dict[str, str], file: str) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    for shard, header in headers.items():
        twice = next((name for name in header.entries if name in entries), None)
        if twice is not None:
            raise CheckpointError(f"{shard}: tensor {twice} is in {entries[twice].file} as well")
        entries.update(header.entries)
    for name, shard in weight_map.items():
        if name not in entries or os.path.basename(entries[name].file) != shard:
            where = f", it is in {entries[name].file}" if name in entries else ""
            raise CheckpointError(f"{file}: tensor {name} must be in {shard}, which does not hold it{where}")
    return entries


def _optional_text(file: str) -> bytes | None:
    """The text of a config file, None where there is none. A link to nothing is an error."""
    return read_all(file, MAX_CONFIG_BYTES) if os.path.lexists(file) else None


def _optional_object(text: bytes | None, file: str) -> dict[str, Any]:
    return {} if text is None else parse_object(text, file)
