"""Which kernel of `cuda_sm90` runs up to how many tokens, as `python -m torch_moe_ops tune --backend cuda_sm90` found.

One JSON file a kind of device: those of a user in the folder `cuda_sm90` beside tuned.py's own files, the library's in
tile_tables/cuda_sm90. A user's come first; a user's entries of another version of the library are not
used. All are read once, when the library is imported: never while a layer runs, so never inside a capture.

    {"format": 1, "device": name, "layers": [{"scheme": ..., "act_format": ..., "num_experts": ..., "top_k": ...,
     "hidden_size": ..., "intermediate_size": ..., "library": version,
     "kernels": [["decode", 14], ["slim", 384], ["narrow", 1280], ["wide", null]]}]}

`kernels`: the first one whose number is not below the number of tokens runs; null, of the last one, is no bound.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from torch_moe_ops.core.kernel_facts import SM90_KERNELS, Sm90, Sm90Decode
from torch_moe_ops.core.version import __version__
from torch_moe_ops.tuning import tuned
from torch_moe_ops.tuning.tuned import Key

FORMAT = 1
KERNELS = SM90_KERNELS
DECODE_MAX_SLOTS = Sm90Decode.MAX_SLOTS
INTERMEDIATE_STEP = Sm90.TILE_K  # what the layout pads the intermediate size to: layers that are padded alike are one

Switches = tuple[tuple[str, int | None], ...]  # kernels and the tokens that they run up to
Table = dict[str, dict[Key, Switches]]
TABLE: Table = {}  # the user's
SHIPPED: Table = {}
FOLDER = "cuda_sm90"
FORGET: list[Callable[[], None]] = []  # what drops choices made from the tables


def key_of(scheme: str, act_format: str, num_experts: int, top_k: int, hidden: int, inter: int) -> Key:
    """The key of a layer. num_experts: those of this rank; inter: padded or not."""
    return Key(scheme, act_format, num_experts, top_k, hidden, -(-inter // INTERMEDIATE_STEP) * INTERMEDIATE_STEP)


def folder() -> Path | None:
    """Where a user's files lie; None where `tuned.folder` is none."""
    where = tuned.folder()
    return None if where is None else where / FOLDER


def check(switches: Any, top_k: int) -> Switches:
    """The same as tuples. ValueError unless known kernels, bounds that ascend, and none at the end."""
    pairs = [tuple(pair) if isinstance(pair, (list, tuple)) else pair for pair in switches]
    if not pairs or any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise ValueError(f"kernels must be pairs of a kernel and its most tokens, got {switches!r}")
    names, bounds = zip(*pairs, strict=True)
    if not set(names) <= set(KERNELS):
        raise ValueError(f"kernels must be of {', '.join(KERNELS)}, got {names}")
    *most, last = bounds
    if last is not None or not all(type(bound) is int and bound > 0 for bound in most):
        raise ValueError(f"bounds must be positive, and null at the end, got {bounds}")
    if sorted(set(most)) != most:
        raise ValueError(f"bounds must ascend, got {bounds}")
    for name, bound in pairs:
        if name == "decode" and (bound is None or bound * top_k > DECODE_MAX_SLOTS):
            raise ValueError(f"decode must end at {DECODE_MAX_SLOTS // top_k} tokens with top_k {top_k}, got {bound}")
    return tuple(pairs)


def read(path: Path, any_library: bool = False) -> tuple[str, dict[Key, Switches]]:
    """Device name and layers of one file, those of this library unless any_library.

    Raises ValueError naming the file, where it cannot be read or is not what `save` writes.
    """
    try:
        data = tuned.read_json(path, FORMAT)
        layers = {}
        for layer in data["layers"]:
            key = tuned.key_from(layer)
            switches = check(layer["kernels"], key.top_k)
            if any_library or layer["library"] == __version__:
                layers[key_of(*key)] = switches
        return data["device"], layers
    except tuned.READING_FAILS as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from error


def load(where: Path | None = None) -> None:
    """Fill TABLE from the files of a folder (None: the configured one); a damaged file warns and counts for nothing."""
    tuned.fill(TABLE, folder() if where is None else where, read, "kernels")
    tuned.fill(SHIPPED, tuned.SHIPPED_FOLDER / FOLDER, partial(read, any_library=True), "kernels")
    for forget in FORGET:
        forget()


def save(device_name: str, key: Key, switches: Switches, where: Path) -> Path:
    """Write one layer's kernels beside those that the file holds; the file is replaced in one step.

    Layers of other versions of the library are dropped, as is a damaged file.
    """
    path = tuned.file_of(device_name, where)
    try:
        stored_device, layers = read(path)
        layers = layers if stored_device == device_name else {}
    except ValueError:
        layers = {}
    layers[key_of(*key)] = check(switches, key.top_k)
    lines = ",\n ".join(
        json.dumps(k._asdict() | {"library": __version__, "kernels": layers[k]}) for k in sorted(layers)
    )
    head = json.dumps({"format": FORMAT, "device": device_name})
    tuned.replace_file(path, f'{head[:-1]}, "layers": [\n {lines}]}}\n')
    return path


@lru_cache(maxsize=4096)
def lookup(device_name: str, key: Key) -> tuple[Switches, str] | None:
    """A layer's kernels and whose table has them, or None.

    What was measured with 16-bit activations serves other activation formats where they have nothing of their own.
    """
    for wanted in dict.fromkeys((key, key._replace(act_format="none"))):
        for table, source in ((TABLE, "a table made here"), (SHIPPED, "the library's table")):
            switches = table.get(device_name, {}).get(wanted)
            if switches is not None:
                return switches, source
    return None


FORGET.append(lookup.cache_clear)
load()
