"""Tile sizes that `python -m torch_moe_ops tune` found.

One JSON file a kind of device. Those of a user lie in `$MOEQ_TUNE_DIR`, else `$XDG_CACHE_HOME/torch_moe_ops/tune`,
else `~/.cache/torch_moe_ops/tune` (an empty MOEQ_TUNE_DIR, or no home directory: none); the library's own, of a few
models, in torch_moe_ops/tuning/tile_tables. A user's come first. All are read once, when the library is imported: never
while a layer runs, so never inside a capture. They change which tiles a kernel takes and with them the order of float32
sums, nothing else. Entries of another Triton are not used, a user's of another version of the library neither.

    {"format": 1, "device": name, "problems": [{"scheme": ..., "act_format": ..., "num_experts": ..., "top_k": ...,
     "hidden_size": ..., "intermediate_size": ..., "library": version, "triton": version, "configs": [
        {"tokens": 64, "us": 135.6, "blocks": [16, 16], "gemm1": [128, 128, 4, 4, 0, 1], "gemm2": [...]}]}]}

`blocks`: tokens of a tile, of a nearly empty one. `gemm1`, `gemm2`: the fields of configs.Tile.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
import warnings
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from torch_moe_ops.core.version import __version__

FORMAT = 1
ENVIRONMENT_VARIABLE = "MOEQ_TUNE_DIR"
MAX_BYTES = 16 << 20
# A configuration serves numbers of tokens up to this factor away from the one that it was tuned for.
REACH = 1.5

T = TypeVar("T")
Fields = tuple[tuple[int, ...], ...]  # (blocks, gemm1, gemm2), as configs.Config has them


class Key(NamedTuple):
    """What decides a tuned table, beside the device. num_experts: those of this rank."""

    scheme: str
    act_format: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int


class Entry(NamedTuple):
    """The best configuration of one number of tokens, and its median time."""

    tokens: int
    us: float
    config: Fields


# device name -> problem -> entries by tokens, ascending
Table = dict[str, dict[Key, tuple[Entry, ...]]]
TABLE: Table = {}  # the user's
SHIPPED: Table = {}
SHIPPED_FOLDER = Path(__file__).parent / "tile_tables"


def folder() -> Path | None:
    """Where tuned files lie; None where MOEQ_TUNE_DIR is empty, or nothing says and there is no home directory."""
    given = os.environ.get(ENVIRONMENT_VARIABLE)
    if given is not None:
        return Path(given) if given else None
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        base = Path(cache) if cache else Path.home() / ".cache"
    except RuntimeError:  # HOME is not set and the user has no passwd entry, as in a container run with `--user 12345`
        return None
    return base / "torch_moe_ops" / "tune"


def no_folder_reason() -> str | None:
    """None where `folder` is one, else what to do about it."""
    if folder() is not None:
        return None
    got = "none and no home directory" if os.environ.get(ENVIRONMENT_VARIABLE) is None else "an empty one"
    return f"{ENVIRONMENT_VARIABLE} must name a folder, got {got}"


def file_of(device_name: str, where: Path) -> Path:
    """The file of one kind of device."""
    return where / f"{re.sub(r'[^A-Za-z0-9]+', '-', device_name).strip('-').lower()}.json"


def triton_version() -> str:
    """The version of Triton here, "" without it; read without importing it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


def _power_of_two(value: int, low: int, high: int) -> bool:
    return low <= value <= high and value & (value - 1) == 0


def _valid_tile(tile: Any, split: bool) -> bool:
    if not isinstance(tile, list) or len(tile) != 6 or not all(type(v) is int for v in tile):
        return False
    n, k, warps, stages, registers, parts = tile
    return (
        _power_of_two(n, 16, 512)
        and _power_of_two(k, 16, 1024)
        and _power_of_two(warps, 1, 16)
        and 1 <= stages <= 16
        and (registers == 0 or 32 <= registers <= 255)
        and _power_of_two(parts, 1, 32 if split else 1)
    )


def _entry(value: Any) -> Entry:
    """ValueError where it is not what `save` writes: such a tile could not be compiled, or would be wrong."""
    tokens, us, blocks = value["tokens"], value["us"], value["blocks"]
    if type(tokens) is not int or tokens < 1 or not isinstance(us, (int, float)) or not us > 0:
        raise ValueError(f"tokens and us must be positive, got {tokens!r} and {us!r}")
    sizes = isinstance(blocks, list) and len(blocks) == 2 and all(type(v) is int for v in blocks)
    if not sizes or not all(_power_of_two(v, 16, 256) for v in blocks) or blocks[1] > blocks[0]:
        raise ValueError(f"blocks must be two powers of two from 16 to 256, got {blocks!r}")
    for name in ("gemm1", "gemm2"):
        if not _valid_tile(value[name], split=name == "gemm2"):
            raise ValueError(f"{name} must be the fields of a tile, got {value[name]!r}")
    return Entry(tokens, float(us), (tuple(blocks), tuple(value["gemm1"]), tuple(value["gemm2"])))


def key_from(problem: dict[str, Any]) -> Key:
    """The key in an entry of a file; ValueError where it is none."""
    values = [problem[name] for name in Key._fields]
    if not all(isinstance(v, str) for v in values[:2]) or not all(type(v) is int and v > 0 for v in values[2:]):
        raise ValueError(f"a problem must have names and positive sizes, got {values}")
    return Key(*values)


# What reading a file of the wrong content may raise.
READING_FAILS = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


def read_json(path: Path, version: int) -> dict[str, Any]:
    """A file's content with its "format" and "device" checked; one of READING_FAILS where it is not that."""
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"must have at most {MAX_BYTES} bytes")
    data = json.loads(path.read_text("utf-8"))
    if data["format"] != version:
        raise ValueError(f"format must be {version}, got {data['format']!r}")
    if not isinstance(data["device"], str):
        raise ValueError(f"device must be a name, got {data['device']!r}")
    return data


def read(path: Path, any_library: bool = False) -> tuple[str, dict[Key, tuple[Entry, ...]]]:
    """Device name and tuned problems of one file, those of this Triton and (unless any_library) this library.

    Raises ValueError naming the file, where it cannot be read or is not what `save` writes.
    """
    try:
        data = read_json(path, FORMAT)
        problems = {}
        for problem in data["problems"]:
            entries = sorted(_entry(value) for value in problem["configs"])
            library = __version__ if any_library else problem["library"]
            if (library, problem["triton"]) == (__version__, triton_version()):
                problems[key_from(problem)] = tuple(entries)
        return data["device"], problems
    except READING_FAILS as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from error


def load(where: Path | None = None) -> None:
    """Fill TABLE from the files of a folder (None: the configured one); a damaged file warns and counts for nothing."""
    fill(TABLE, folder() if where is None else where, read, "tile sizes")
    fill(SHIPPED, SHIPPED_FOLDER, partial(read, any_library=True), "tile sizes")
    _nearest.cache_clear()


def files_of(where: Path | None) -> list[Path]:
    """The JSON files of a folder; none where it cannot be read."""
    try:
        return sorted(where.glob("*.json")) if where is not None else []
    except OSError:
        return []


def fill(
    table: dict[str, dict[Key, T]], where: Path | None, read: Callable[[Path], tuple[str, dict[Key, T]]], what: str
) -> None:
    """Make a table of a folder's files, by device. One that `read` refuses warns, as tuned `what`, and is left out."""
    table.clear()
    for path in files_of(where):
        try:
            device, problems = read(path)
        except ValueError as error:
            warnings.warn(f"tuned {what} are ignored: {error}", stacklevel=3)
            continue
        if problems:
            table.setdefault(device, {}).update(problems)


def save(device_name: str, key: Key, entries: list[Entry], where: Path) -> Path:
    """Write one problem's configurations beside those that the file holds; the file is replaced in one step.

    Problems of other versions of the library or of Triton are dropped, as is a damaged file.
    """
    path = file_of(device_name, where)
    try:
        stored_device, problems = read(path)
        problems = problems if stored_device == device_name else {}
    except ValueError:
        problems = {}
    by_tokens = {e.tokens: e for e in (*problems.get(key, ()), *entries)}
    problems[key] = tuple(sorted(by_tokens.values()))
    replace_file(path, _text(device_name, problems))
    return path


def replace_file(path: Path, text: str) -> None:
    """Write a file in one step, and its folder where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # mkstemp's files are the user's alone
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _text(device_name: str, problems: dict[Key, tuple[Entry, ...]]) -> str:
    """JSON with a line for each configuration."""
    texts = []
    for key, entries in sorted(problems.items()):
        head = json.dumps(key._asdict() | {"library": __version__, "triton": triton_version()})
        lines = ",\n  ".join(json.dumps(_as_json(entry)) for entry in entries)
        texts.append(f' {head[:-1]}, "configs": [\n  {lines}]}}')
    head = json.dumps({"format": FORMAT, "device": device_name})
    return f'{head[:-1]}, "problems": [\n' + ",\n".join(texts) + "]}\n"


def _as_json(entry: Entry) -> dict[str, Any]:
    blocks, gemm1, gemm2 = entry.config
    return {"tokens": entry.tokens, "us": entry.us, "blocks": blocks, "gemm1": gemm1, "gemm2": gemm2}


def nearest(entries: tuple[Entry, ...], tokens: int) -> Entry | None:
    """The entry tuned for the number of tokens nearest by ratio, at most REACH away; one token is for itself alone."""
    if tokens < 1:
        return None
    if tokens == 1:
        return next((e for e in entries if e.tokens == 1), None)
    near = [e for e in entries if e.tokens > 1 and max(e.tokens, tokens) <= REACH * min(e.tokens, tokens)]
    return min(near, key=lambda e: abs(math.log(e.tokens / tokens)), default=None)


@lru_cache(maxsize=65536)
def _nearest(device_name: str, key: Key, tokens: int, own: bool) -> Fields | None:
    # Weights decide most: what 16-bit activations are fastest with is the better guess than rules.
    for wanted in dict.fromkeys((key, key._replace(act_format="none"))):
        for table in (TABLE, SHIPPED) if own else (SHIPPED,):
            entry = nearest(table.get(device_name, {}).get(wanted, ()), tokens)
            if entry is not None:
                return entry.config
    return None


@lru_cache(maxsize=64)
def name_of_device(device_index: int) -> str:
    return torch.cuda.get_device_name(device_index)


def lookup(key: Key, tokens: int, own: bool = True) -> Fields | None:
    """(blocks, gemm1, gemm2) tuned on a device like the current one for about this many tokens, or None.

    What was tuned with 16-bit activations serves other activation formats where they have nothing of their own.
    own: whether the user's files count.
    """
    if not torch.cuda.is_initialized():  # Triton's interpreter
        return None
    return _nearest(name_of_device(torch.cuda.current_device()), key, tokens, own)


def note(scheme: str, act_format: str, experts: tuple[int, int], top_k: int | None, hidden: int, inter: int) -> str:
    """For `explain`: for which numbers of tokens the current CUDA device has tuned tile sizes; "" for none.

    experts: those of this rank, and of all (with some elsewhere, as many slots here take more tokens).
    """
    local, total = experts
    sizes = (scheme, local, hidden, inter)
    if not (TABLE or SHIPPED) or not torch.cuda.is_available():
        return ""
    texts = []
    for table, where in ((TABLE, "tuned here"), (SHIPPED, "of the library's table")):
        for key, entries in table.get(name_of_device(torch.cuda.current_device()), {}).items():
            same = (key.scheme, key.num_experts, key.hidden_size, key.intermediate_size) == sizes
            if same and key.act_format in (act_format, "none") and top_k in (None, key.top_k):
                tokens = ", ".join(str(e.tokens if e.tokens == 1 else e.tokens * total // local) for e in entries)
                kind = "" if key.act_format == act_format else " and 16-bit activations"
                texts.append(f"tile sizes {where} for top_k {key.top_k} and about {tokens} tokens{kind}")
    return "; ".join(texts)


load()
