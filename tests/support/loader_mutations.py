"""Mutations of safetensors headers and of JSON texts that know what they change."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from typing import Any

NUMBERS = [0, 1, -1, 2, 3, 7, 8, 16, 64, 127, 128, 2**31, 2**32, 2**53, 2**62, 2**63, 2**64, 10**12, 10**300, 10**400]
NUMBERS += [0.5, -0.5, 1e-400, 1e308, float("nan"), float("inf"), float("-inf")]
WORDS = ["", "silu", "gelu", "swigluoai", "relu2", "nvfp4", "fp8", "int8", "modelopt", "block", "channel", "gptq_v2"]
WORDS += ["reference", "cpu", "exact", "float16", "\ud800", "\x00", "\x1b[2J", "7", "%7B", "a" * 600, "[" * 70]
VALUES: list[Any] = [None, True, False, [], {}, [None], [[]], {"": 0}, [128, 128], [1e999, 1], ["a", "b"]]
DTYPES = [
    "U8",
    "I8",
    "I32",
    "I64",
    "F8_E4M3",
    "F8_E8M0",
    "F8_E5M2",
    "BF16",
    "F16",
    "F32",
    "F64",
    "BOOL",
    "F4",
    "F6_E2M3",
    "C64",
    "F5",
]
WIDTHS = {"U8": 1, "I8": 1, "I32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "BF16": 2, "F16": 2, "F32": 4, "I64": 8}
PARTS = [
    "weight",
    "weight_scale",
    "weight_scale_2",
    "weight_scale_inv",
    "input_scale",
    "scale",
    "bias",
    "qweight",
    "scales",
]
PARTS += [
    "qzeros",
    "g_idx",
    "weight_packed",
    "weight_shape",
    "weight_zero_point",
    "weight_global_scale",
    "pre_quant_scale",
]
PIECES = [
    "layers",
    "mtp",
    "experts",
    "model",
    "0",
    "1",
    "7",
    "007",
    "9" * 30,
    "9" * 500,
    "٣",
    "-1",
    "",
    "enorm",
    "eh_proj",
]
PIECES += ["gate_up_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "gate_up_proj_bias", "blocks", *PARTS]
FIELDS = [
    "hidden_act",
    "swiglu_limit",
    "swiglu_alpha",
    "num_local_experts",
    "num_experts",
    "num_hidden_layers",
    "text_config",
]
FIELDS += [
    "quantization_config",
    "weight_block_size",
    "config_groups",
    "weights",
    "block_structure",
    "strategy",
    "bits",
]
FIELDS += ["model_type", "num_bits", "version", "checkpoint_format", "weight_map", "quantization", "moe_num_experts"]
JUNK = b'0123456789"{}[],:.eE-+\\/nulltruefalse \n\x00\x80\xff'


def any_value(rng: random.Random) -> Any:
    kind = rng.random()
    if kind < 0.4:
        return rng.choice(NUMBERS)
    return rng.choice(WORDS) if kind < 0.7 else rng.choice(VALUES)


# --- of texts -----------------------------------------------------------------------------------------------------


def damage_text(text: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, a slice lost, doubled or moved, or nesting added."""
    if not text:
        return rng.choice([b"", b"{", b"[]", b"\xff"])
    kind, start = rng.random(), rng.randrange(len(text))
    end = min(len(text), start + rng.randint(1, 40))
    if kind < 0.5:
        changed = bytearray(text)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(changed))] = rng.choice([rng.randrange(256), *JUNK])
        return bytes(changed)
    if kind < 0.6:
        return text[:start] + text[end:]
    if kind < 0.7:
        return text[:end] + text[start:]
    if kind < 0.8:
        return text[:start]
    if kind < 0.9:
        return text[:start] + bytes(rng.choices(JUNK, k=rng.randint(1, 12))) + text[start:]
    depth = rng.choice([2, 60, 70, 1000, 20_000])
    return text[:start] + rng.choice([b"[", b'{"a":', b'"', b"9", b"\\"]) * depth + text[start:]


def mutate_json(value: Any, rng: random.Random, depth: int = 0) -> Any:
    """The value with one node changed somewhere inside."""
    if isinstance(value, dict) and value and depth < 8 and rng.random() < 0.85:
        key = rng.choice(list(value))
        kind = rng.random()
        if kind < 0.6:
            return value | {key: mutate_json(value[key], rng, depth + 1)}
        rest = {k: v for k, v in value.items() if k != key}
        if kind < 0.75:
            return rest
        if kind < 0.85:
            return rest | {rng.choice([*FIELDS, *WORDS]): value[key]}
        return value | {rng.choice([*FIELDS, *value]): any_value(rng)}
    if isinstance(value, list) and value and depth < 8 and rng.random() < 0.7:
        where = rng.randrange(len(value))
        return [*value[:where], mutate_json(value[where], rng, depth + 1), *value[where + 1 :]]
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.4:
        return value + rng.choice([-1, 1, value, -2 * value])
    if isinstance(value, str) and value[:1] in "{%" and rng.random() < 0.8:
        return _mutate_quoted(value, rng, depth)
    return any_value(rng)


def _mutate_quoted(text: str, rng: random.Random, depth: int) -> str:
    """JSON inside a string, as headers of saved weights have it."""
    from urllib.parse import quote, unquote

    try:
        changed = dump(mutate_json(json.loads(unquote(text)), rng, depth + 1)).decode("utf-8", "replace")
    except ValueError:
        return text[: len(text) // 2]
    return quote(changed) if text[0] == "%" else changed


def dump(value: Any) -> bytes:
    return json.dumps(value).encode()


# --- of headers ---------------------------------------------------------------------------------------------------

Header = dict[str, Any]
Mutation = Callable[[Header, random.Random], None]


def _some(header: Header, rng: random.Random) -> str:
    return rng.choice([name for name in header if name != "__metadata__"])


def change_entry(header: Header, rng: random.Random) -> None:
    entry = header[_some(header, rng)]
    key = rng.choice(["dtype", "shape", "data_offsets", "size", "offset", "lost"])
    if key == "dtype":
        entry["dtype"] = rng.choice([*DTYPES, any_value(rng)])
    elif key in ("size", "offset"):
        numbers = entry["shape" if key == "size" else "data_offsets"]
        if numbers:
            numbers[rng.randrange(len(numbers))] = rng.choice([*NUMBERS, any_value(rng)])
    elif key == "lost":
        del entry[rng.choice(list(entry))]
    else:
        entry[key] = rng.choice([any_value(rng), [2**62] * rng.choice([2, 70, 3000]), [1] * 60, [0, 0]])


def reshape_entry(header: Header, rng: random.Random) -> None:
    """Another shape and dtype of the same size: a header that is valid in itself."""
    entry = header[_some(header, rng)]
    size = entry["data_offsets"][1] - entry["data_offsets"][0]
    dtype = rng.choice([d for d, width in WIDTHS.items() if size % width == 0])
    count = size // WIDTHS[dtype]
    first = rng.choice([d for d in (1, 2, 3, 4, 8, 16, 32, 64, count) if d and count % d == 0])
    shapes = [[count], [first, count // first], [1, first, count // first], [count // first, first], [count, 1]]
    entry.update(dtype=dtype, shape=rng.choice(shapes))


def empty_entry(header: Header, rng: random.Random) -> None:
    """No elements, but large sizes beside the zero; only valid for what is added."""
    name = rng.choice([_some(header, rng), rename(_some(header, rng), rng)])
    shape = rng.choice([[0], [10**12, 0, 8], [0, 2**62], [64, 0], [2**62, 0, 2**62], [3, 0]])
    header[name] = {"dtype": rng.choice(DTYPES), "shape": shape, "data_offsets": [0, 0]}


def rename(name: str, rng: random.Random) -> str:
    pieces = name.split(".")
    where = rng.randrange(len(pieces))
    kind = rng.random()
    if kind < 0.7:
        pieces[where] = rng.choice([*PIECES, *pieces])
    elif kind < 0.8:
        del pieces[where]
    elif kind < 0.95:
        pieces[where:where] = rng.choices([*PIECES, *pieces], k=rng.randint(1, 3))
    else:
        pieces[where:where] = ["layers", "1"] * rng.choice([3, 40, 5000])
    return ".".join(pieces)


def rename_entry(header: Header, rng: random.Random) -> None:
    name = _some(header, rng)
    header[rename(name, rng)] = header.pop(name)


def rename_everywhere(header: Header, rng: random.Random) -> None:
    """One component of a name, in all names: other formats, experts and layers that are complete."""
    old, new = rng.choice(_some(header, rng).split(".")), rng.choice(PIECES)
    for name in [name for name in header if old in name.split(".")]:
        header[".".join(new if piece == old else piece for piece in name.split("."))] = header.pop(name)


def drop_entry(header: Header, rng: random.Random) -> None:
    del header[rng.choice(list(header))]


def drop_everywhere(header: Header, rng: random.Random) -> None:
    piece = rng.choice(_some(header, rng).split("."))
    for name in [name for name in header if piece in name.split(".")]:
        del header[name]


def swap_entries(header: Header, rng: random.Random) -> None:
    a, b = _some(header, rng), _some(header, rng)
    header[a], header[b] = header[b], header[a]


def add_many(header: Header, rng: random.Random) -> None:
    """Tensors without data, by the hundred."""
    template = rng.choice(["model.layers.{}.enorm.weight", f"model.layers.0.mlp.experts.{{}}.w1.{rng.choice(PARTS)}"])
    template = rng.choice([template, "layers.1." * 40 + "{}.experts", "model.layers.{}.mlp.experts.0.w1.weight"])
    for n in range(rng.choice([3, 50, 300])):
        header[template.format(n)] = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}


def change_metadata(header: Header, rng: random.Random) -> None:
    header["__metadata__"] = mutate_json(header.get("__metadata__", {"format": "pt"}), rng)


MUTATIONS: list[Mutation] = [
    change_entry,
    reshape_entry,
    reshape_entry,
    empty_entry,
    rename_entry,
    rename_everywhere,
    drop_entry,
    drop_everywhere,
    swap_entries,
    add_many,
    change_metadata,
]


DAMAGE = "damage_text"


def mutate_header(text: bytes, rng: random.Random, favour_metadata: bool) -> tuple[bytes, list[str]]:
    """A header with some of the mutations, or a damaged text; and the names of what was done."""
    if rng.random() < 0.2:
        return damage_text(text, rng), [DAMAGE]
    header: Header = json.loads(text)
    done = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        mutation = change_metadata if favour_metadata and rng.random() < 0.6 else rng.choice(MUTATIONS)
        try:
            mutation(header, rng)
        except (LookupError, TypeError, AttributeError, ValueError):
            break  # an earlier mutation left nothing that this one could change
        done.append(mutation.__name__)
    return dump(header), done


def prefix(length: int, rng: random.Random) -> bytes:
    """The length of the header as the file says it, sometimes wrong."""
    wrong = [0, 1, length - 1, length + 1, 2**20, 10**8 + 1, 2**40, 2**63, 2**64 - 1]
    return struct.pack("<Q", length if rng.random() < 0.97 else rng.choice(wrong) % 2**64)
