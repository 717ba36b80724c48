"""The header of one safetensors file: names, dtypes, shapes and byte ranges, without reading data.

File format: 8 bytes little-endian header length, a JSON object, then the data. Nothing in the header is trusted:
every range is checked against the file, so that later reads cannot run outside it.
"""

from __future__ import annotations

import json
import math
import os
from typing import Any, NamedTuple

import torch

from torch_moe_ops.checkpoints.errors import CheckpointError

# The format's reference implementation refuses larger headers as well.
MAX_HEADER_BYTES = 100_000_000

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}
# Dtypes of the format that no torch tensor can hold one by one: known, so that they may stand beside the experts.
_SUB_BYTE_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


class TensorEntry(NamedTuple):
    """Where a tensor lies and what it is. `start` counts from the beginning of the file."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class _DuplicateKey(ValueError):
    pass


def read_header(file: str) -> dict[str, TensorEntry]:
    """Tensors of one safetensors file by name.

    Raises:
        CheckpointError: naming the file and, where one is at fault, the tensor.
    """
    try:
        size = os.path.getsize(file)
        with open(file, "rb") as stream:
            text, data_start = _header_text(stream, file, size)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error
    header = _parse(text, file)
    header.pop("__metadata__", None)
    entries = {name: _entry(file, name, value, data_start) for name, value in header.items()}
    _check_ranges(file, entries, data_start, size)
    return entries


def _header_text(stream: Any, file: str, size: int) -> tuple[bytes, int]:
    prefix = stream.read(8)
    if len(prefix) < 8:
        raise CheckpointError(f"{file}: is truncated: the header length needs 8 bytes, the file has {size}")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{file}: header length must be at most {MAX_HEADER_BYTES} bytes, got {length}")
    if length > size - 8:
        raise CheckpointError(f"{file}: is truncated: the header needs {length} bytes, the file has {size - 8} left")
    return stream.read(length), 8 + length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        raise _DuplicateKey(next(key for key, _ in pairs if key in seen or seen.add(key)))  # type: ignore[func-returns-value]
    return result


def _parse(text: bytes, file: str) -> dict[str, Any]:
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except _DuplicateKey as error:
        raise CheckpointError(f"{file}: tensor {error} appears twice in the header") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: header must be a JSON object: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: header must be a JSON object, got {type(header).__name__}")
    return header


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _entry(file: str, name: str, value: Any, data_start: int) -> TensorEntry:
    def fail(requirement: str, got: Any) -> CheckpointError:
        return CheckpointError(f"{file}: tensor {name}: {requirement}, got {_short(got)}")

    if not isinstance(value, dict):
        raise fail("its header entry must be an object", value)
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or (dtype not in TORCH_DTYPES and dtype not in _SUB_BYTE_BITS):
        raise fail(f"dtype must be one of {sorted([*TORCH_DTYPES, *_SUB_BYTE_BITS])}", dtype)
    if not isinstance(shape, list) or not all(map(_is_size, shape)):
        raise fail("shape must be a list of sizes", shape)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise fail("data_offsets must be two positions", offsets)
    bits = _SUB_BYTE_BITS.get(dtype) or TORCH_DTYPES[dtype].itemsize * 8
    nbytes = -(-math.prod(shape) * bits // 8)
    begin, end = offsets
    if end - begin != nbytes:
        raise fail(f"data_offsets must span {nbytes} bytes for {dtype} {tuple(shape)}", offsets)
    return TensorEntry(file, dtype, tuple(shape), data_start + begin, nbytes)


def _check_ranges(file: str, entries: dict[str, TensorEntry], data_start: int, size: int) -> None:
    """Every tensor inside the file, none sharing bytes with another."""
    position, previous = data_start, ""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if entry.start + entry.nbytes > size:
            needed = entry.start + entry.nbytes
            raise CheckpointError(f"{file}: is truncated: tensor {name} ends at byte {needed}, the file has {size}")
        if entry.start < position:
            raise CheckpointError(f"{file}: tensor {name} shares bytes with tensor {previous}")
        position, previous = entry.start + entry.nbytes, name


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
