"""The header of one safetensors file: names, dtypes, shapes and byte ranges, without reading data.

File format: 8 bytes little-endian header length, a JSON object, then the data. Nothing in the header is trusted:
every range is checked against the file, so that later reads cannot run outside it.
"""

from __future__ import annotations

import hashlib
import math
import os
from typing import Any, BinaryIO, NamedTuple

import torch

from torch_moe_ops.files.errors import CheckpointError, short
from torch_moe_ops.files.limits import MAX_DIMENSIONS, MAX_HEADER_BYTES, MAX_NAME_LENGTH, MAX_TENSORS
from torch_moe_ops.files.reading import open_regular, parse_object, unreadable

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
_NO_GAPS = "every byte of the data must belong to a tensor"


class TensorEntry(NamedTuple):
    """Where a tensor lies and what it is. `start` counts from the beginning of the file."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class Header(NamedTuple):
    """A file's tensors by name, its own notes, and what tells whether it is still the same file.

    metadata: the object "__metadata__", {} where there is none. digest: of the header's bytes.
    """

    entries: dict[str, TensorEntry]
    metadata: dict[str, Any]
    digest: bytes


def read_header(file: str) -> Header:
    """The header of one safetensors file.

    Raises:
        CheckpointError: naming the file and, where one is at fault, the tensor. Besides a header that contradicts
            itself or the file: bytes that belong to no tensor, and what exceeds a limit of `limits`.
    """
    with open_regular(file) as stream:
        text, size = header_text(stream, file)
    header = parse_object(text, file, "header ", unique="tensor")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{file}: __metadata__ must be an object, got {short(metadata)}")
    if len(header) > MAX_TENSORS:
        raise CheckpointError(f"{file}: must hold at most {MAX_TENSORS} tensors, got {len(header)}")
    data_start = 8 + len(text)
    entries = {name: _entry(file, name, value, data_start) for name, value in header.items()}
    _check_ranges(file, entries, data_start, size)
    return Header(entries, metadata, digest_of(text))


def digest_of(text: bytes) -> bytes:
    """What headers are compared by."""
    return hashlib.blake2b(text, digest_size=16).digest()


def header_text(stream: BinaryIO, file: str) -> tuple[bytes, int]:
    """The JSON text at the beginning of an open file, and the file's size in bytes."""
    try:
        size = os.fstat(stream.fileno()).st_size
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise CheckpointError(f"{file}: is truncated: the header length needs 8 bytes, the file has {size}")
        length = int.from_bytes(prefix, "little")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(f"{file}: header length must be at most {MAX_HEADER_BYTES} bytes, got {length}")
        # Not read at once: that would take the memory that the file claims to need.
        text = stream.read(length) if length <= size - 8 else b""
    except OSError as error:
        raise unreadable(file, error) from error
    if len(text) < length:
        raise CheckpointError(f"{file}: is truncated: the header needs {length} bytes, the file has {size - 8} left")
    return text, size


def check_name(file: str, name: str, what: str = "tensor") -> None:
    """A name that messages can show: not longer than the limit, printable characters."""
    if len(name) > MAX_NAME_LENGTH:
        text = f"{file}: {what} names must have at most {MAX_NAME_LENGTH} characters, got {len(name)}"
        raise CheckpointError(f"{text}: {short(name)}")
    if not name.isprintable():
        raise CheckpointError(f"{file}: {what} names must be printable, got {short(name)}")


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _entry(file: str, name: str, value: Any, data_start: int) -> TensorEntry:
    def fail(requirement: str, got: Any) -> CheckpointError:
        return CheckpointError(f"{file}: tensor {name}: {requirement}, got {short(repr(got))}")

    check_name(file, name)
    if not isinstance(value, dict):
        raise fail("its header entry must be an object", value)
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or (dtype not in TORCH_DTYPES and dtype not in _SUB_BYTE_BITS):
        raise fail(f"dtype must be one of {sorted([*TORCH_DTYPES, *_SUB_BYTE_BITS])}", dtype)
    if not isinstance(shape, list) or not all(map(_is_size, shape)):
        raise fail("shape must be a list of sizes", shape)
    if len(shape) > MAX_DIMENSIONS:
        raise fail(f"shape must have at most {MAX_DIMENSIONS} dimensions", len(shape))
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise fail("data_offsets must be two positions", offsets)
    bits = _SUB_BYTE_BITS.get(dtype) or TORCH_DTYPES[dtype].itemsize * 8
    # Sizes of zero left out: torch multiplies the others too.
    if math.prod(filter(None, shape)) * bits >= 2**63:
        raise fail("shape must have less than 2^63 bits, sizes of zero left out", shape)
    nbytes = -(-math.prod(shape) * bits // 8)
    begin, end = offsets
    if end - begin != nbytes:
        raise fail(f"data_offsets must span {nbytes} bytes for {dtype} {short(tuple(shape))}", offsets)
    return TensorEntry(file, dtype, tuple(shape), data_start + begin, nbytes)


def _check_ranges(file: str, entries: dict[str, TensorEntry], data_start: int, size: int) -> None:
    """Every tensor inside the file, none sharing bytes with another, and no byte that belongs to none."""
    position, previous = data_start, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if entry.start + entry.nbytes > size:
            needed = entry.start + entry.nbytes
            raise CheckpointError(f"{file}: is truncated: tensor {name} ends at byte {needed}, the file has {size}")
        if entry.start < position:
            raise CheckpointError(f"{file}: tensor {name} shares bytes with {previous}")
        if entry.start > position:
            where = f"between {previous} and tensor {name}"
            raise CheckpointError(f"{file}: {entry.start - position} bytes {where}: {_NO_GAPS}")
        position, previous = entry.start + entry.nbytes, f"tensor {name}"
    if position != size:
        raise CheckpointError(f"{file}: {size - position} bytes after {previous}: {_NO_GAPS}")
