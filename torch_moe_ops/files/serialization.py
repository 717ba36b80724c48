"""Frozen dataclasses of tensors and plain values as .safetensors files."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.files.errors import CheckpointError, short
from torch_moe_ops.files.header import read_header
from torch_moe_ops.files.index import FileIndex
from torch_moe_ops.files.reading import parse_object
from torch_moe_ops.files.tensor_reader import TensorReader

MAX_WORD = 120
_WORDS = ("scheme", "activation")


def write(path: str | Path, tensors: dict[str, Tensor], plain: dict[str, Any], version: int) -> None:
    """Tensors as they are, plain values as JSON in the header."""
    from safetensors.torch import save_file

    header = {"moeq_format": str(version), "moeq": json.dumps(plain)}
    save_file({name: t.detach().contiguous() for name, t in tensors.items()}, str(path), metadata=header)


def read(path: str | Path, device: torch.device | str, kind: type, version: int) -> dict[str, Any]:
    """The fields of the dataclass `kind`: tensors on `device`, and plain values of the types that it declares.

    Raises:
        CheckpointError: naming the path and what is wrong.
    """
    file = os.fsdecode(path)
    header = read_header(file)
    got = header.metadata.get("moeq_format")
    if got != str(version):
        raise CheckpointError(f"{file}: moeq_format must be {version}, got {short(repr(got))}")
    plain = plain_fields(file, kind, header.metadata.get("moeq"), header.entries)
    index = FileIndex(path=file, entries=header.entries, digests={file: header.digest})
    with TensorReader(index) as reader:
        return {**plain, **{name: reader.read(name).to(device) for name in header.entries}}


def plain_fields(file: str, kind: type, text: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the dataclass `kind` that are no tensors, of the types that it declares.

    Args:
        text: JSON.
        tensors: those that are there, by name; with the plain values they must be the fields of `kind`.

    Raises: CheckpointError, naming `file` and what is wrong.
    """
    types = {f.name: str(f.type) for f in dataclasses.fields(kind)}
    plain = plain_values(file, "moeq", text)
    for name in sorted(plain.keys() & types.keys()):
        # RawWeights.save writes null for a tensor that it lacks.
        if "Tensor" in types[name] and plain[name] is None and name not in tensors:
            del plain[name]
    _check_names(file, kind, plain, tensors)
    check_types(file, plain, types)
    # JSON may write 7 for 7.0; no op takes an integer of hundreds of digits for a number.
    numbers = {name for name in plain if types[name].startswith("float") and plain[name] is not None}
    return plain | {name: float(plain[name]) for name in numbers}


def plain_values(file: str, what: str, text: Any) -> dict[str, Any]:
    """A JSON object that a file keeps as text; CheckpointError where it is none."""
    if not isinstance(text, str):
        raise CheckpointError(f"{file}: {what} must be the text of a JSON object, got {short(repr(text))}")
    return parse_object(text.encode("utf-8", "surrogatepass"), file, f"{what} ")


def _check_names(file: str, kind: type, plain: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    fields = {f.name: f for f in dataclasses.fields(kind)}
    wanted = {name for name, f in fields.items() if "Tensor" in str(f.type)}
    unknown = sorted((plain.keys() - (fields.keys() - wanted)) | (tensors.keys() - wanted))
    required = (name for name, f in fields.items() if f.default is dataclasses.MISSING)
    missing = sorted(set(required) - plain.keys() - tensors.keys())
    if unknown or missing:
        shown = f"unknown {short(repr(unknown))}, missing {missing}"
        raise CheckpointError(f"{file}: fields of {kind.__name__} must match, {shown}")


def check_types(file: str, values: Mapping[str, Any], types: Mapping[str, str], what: str = "") -> None:
    """Plain values as JSON has them, of the types that a dataclass declares.

    Args:
        values: by name; each must be in `types`.
        types: annotations such as "float | None".
        what: what the values are part of, for messages: "raw ", or "".
    """
    for name, value in values.items():
        if name in _WORDS and isinstance(value, str) and not _is_word(value):
            text = f"be printable and have at most {MAX_WORD} characters"
            raise CheckpointError(f"{file}: {what}{name} must {text}, got {short(repr(value))}")
        if not any(_FITS[kind](value) for kind in types[name].split(" | ")):
            raise CheckpointError(f"{file}: {what}{name} must be {types[name]}, got {short(repr(value))}")


def _is_word(value: str) -> bool:
    """Names of schemes and activations, which messages repeat as they are."""
    return value.isprintable() and len(value) <= MAX_WORD


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _is_float(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value


def _is_float_dtype(value: Any) -> bool:
    found = getattr(torch, value, None) if isinstance(value, str) else None
    return isinstance(found, torch.dtype) and found.is_floating_point


_FITS: dict[str, Callable[[Any], bool]] = {
    "None": lambda value: value is None,
    "bool": lambda value: isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "int": _is_int,
    "float": _is_float,
    "torch.dtype": _is_float_dtype,
    "tuple[float, float, float]": lambda value: (
        isinstance(value, list) and len(value) == 3 and all(map(_is_float, value))
    ),
}
