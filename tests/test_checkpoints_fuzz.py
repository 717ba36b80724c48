"""Mutated headers and configs: a load either works or raises CheckpointError, never anything else."""

from __future__ import annotations

import json
import random
import struct
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints_support import FIXTURES

from torch_moe_ops.checkpoints import CheckpointError, load_experts

VALUES = [
    None,
    True,
    0,
    1,
    -1,
    3,
    16,
    2**31,
    2**63,
    0.5,
    "",
    "U8",
    "F8_E4M3",
    "F32",
    "I32",
    "BF16",
    "F4",
    [],
    [0],
    [1],
    {},
]
SOURCES = sorted(f.name for f in FIXTURES.iterdir() if (f / "model.safetensors").exists())


def split(name: str) -> tuple[bytes, bytes]:
    content = (FIXTURES / name / "model.safetensors").read_bytes()
    end = 8 + struct.unpack("<Q", content[:8])[0]
    return content[8:end], content[end:]


def flip_bytes(text: bytes, data: bytes, rng: random.Random) -> tuple[bytes, bytes]:
    changed = bytearray(text)
    for _ in range(rng.randint(1, 4)):
        changed[rng.randrange(len(changed))] = rng.choice([rng.randrange(256), *b'0123456789"{}[],:'])
    return bytes(changed), data


def change_entry(text: bytes, data: bytes, rng: random.Random) -> tuple[bytes, bytes]:
    header: dict[str, Any] = json.loads(text)
    names = [name for name in header if name != "__metadata__" and (rng.random() < 0.1 or ".experts" in name)]
    entry = header[rng.choice(names)]
    key = rng.choice(["dtype", "shape", "data_offsets", "inside"])
    if key == "inside" and entry["shape"]:
        entry["shape"][rng.randrange(len(entry["shape"]))] = rng.choice(VALUES)
    elif key in entry:
        entry[key] = rng.choice(VALUES)
    return json.dumps(header).encode(), data


def reshape_entry(text: bytes, data: bytes, rng: random.Random) -> tuple[bytes, bytes]:
    """Another shape and dtype of the same size: a header that is valid in itself."""
    header: dict[str, Any] = json.loads(text)
    entry = header[rng.choice([name for name in header if ".experts" in name])]
    size = entry["data_offsets"][1] - entry["data_offsets"][0]
    dtype, width = rng.choice(
        [("U8", 1), ("I8", 1), ("F8_E4M3", 1), ("F8_E8M0", 1), ("BF16", 2), ("F32", 4), ("I32", 4)]
    )
    count = size // width
    first = rng.choice([d for d in range(1, count + 1) if count % d == 0] or [1])
    entry.update(dtype=dtype, shape=rng.choice([[count], [first, count // first], [1, first, count // first]]))
    return json.dumps(header).encode(), data


def rename_entry(text: bytes, data: bytes, rng: random.Random) -> tuple[bytes, bytes]:
    header: dict[str, Any] = json.loads(text)
    name = rng.choice([name for name in header if ".experts" in name])
    pieces = name.split(".")
    where = rng.randrange(len(pieces))
    pieces[where] = rng.choice([*name.split("."), "7", "999999999999", "", "weight_scale", "gate_up_proj", "down_proj"])
    header[".".join(pieces)] = header.pop(name)
    return json.dumps(header).encode(), data


def drop_entry(text: bytes, data: bytes, rng: random.Random) -> tuple[bytes, bytes]:
    header: dict[str, Any] = json.loads(text)
    del header[rng.choice(list(header))]
    return json.dumps(header).encode(), data


def cut(text: bytes, data: bytes, rng: random.Random) -> tuple[bytes, bytes]:
    return (text, data[: rng.randrange(len(data))]) if rng.random() < 0.5 else (text[: rng.randrange(len(text))], data)


def spoil_data(text: bytes, data: bytes, rng: random.Random) -> tuple[bytes, bytes]:
    changed = bytearray(data)
    start = rng.randrange(len(changed))
    for position in range(start, min(len(changed), start + rng.randint(1, 2000))):
        changed[position] = rng.randrange(256)
    return text, bytes(changed)


MUTATIONS: list[Callable[[bytes, bytes, random.Random], tuple[bytes, bytes]]] = [
    flip_bytes,
    change_entry,
    reshape_entry,
    rename_entry,
    drop_entry,
    cut,
    spoil_data,
]


def mutated_config(name: str, rng: random.Random) -> str:
    config: dict[str, Any] = json.loads((FIXTURES / name / "config.json").read_text())
    scope = rng.choice([config, config["quantization_config"]])
    keys = ["hidden_act", "swiglu_limit", "num_local_experts", "num_hidden_layers", "config_groups", "text_config"]
    scope[rng.choice([*keys, *scope])] = rng.choice(VALUES)
    return json.dumps(config)


def attempt(folder: Path, seed: int) -> bool:
    """One mutated checkpoint; True if it loads."""
    rng = random.Random(seed)
    name = rng.choice(SOURCES)
    text, data = split(name)
    for mutation in rng.choices(MUTATIONS, k=rng.choice([0, 1, 1, 1, 2])):
        try:
            text, data = mutation(text, data, rng)
        except (ValueError, LookupError, TypeError, AttributeError):
            break  # an earlier mutation left nothing that this one could change
    length = len(text) if rng.random() < 0.95 else rng.choice([0, 1, 2**40, 2**64 - 1, len(text) + 1])
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", length) + text + data)
    (folder / "config.json").write_text(mutated_config(name, rng) if rng.random() < 0.3 else "{}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            for _ in load_experts(folder, None, mtp=True):
                pass
    except CheckpointError:
        return False
    return True


def test_mutations(tmp_path):
    loaded = sum(attempt(tmp_path, seed) for seed in range(250))
    # Both outcomes must occur, else the mutations test nothing.
    assert 10 < loaded < 240


@pytest.mark.slow
def test_mutations_for_a_minute(tmp_path):
    seed, end = 1_000_000, time.monotonic() + 60
    while time.monotonic() < end:
        attempt(tmp_path, seed)
        seed += 1
