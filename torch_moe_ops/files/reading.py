"""Open and parse files that nobody vouches for: regular files only, in time and memory that their size bounds."""

from __future__ import annotations

import json
import os
import stat
from typing import Any, BinaryIO

import numpy as np

from torch_moe_ops.files.errors import CheckpointError, short
from torch_moe_ops.files.limits import MAX_JSON_CONTAINERS, MAX_JSON_DEPTH, MAX_NUMBER_DIGITS

# Without O_NONBLOCK, opening a FIFO waits for a writer.
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


def open_regular(file: str) -> BinaryIO:
    """A regular file (or a link to one), open for reading; the caller closes it.

    Asked before it is opened, as opening a device can have effects, and again after it, as the name may have been
    given to another file meanwhile.

    Raises:
        CheckpointError: it is anything else, or cannot be opened.
    """
    try:
        _require_regular(file, os.stat(file).st_mode)
        descriptor = os.open(file, _FLAGS)
    except OSError as error:
        raise unreadable(file, error) from error
    try:
        _require_regular(file, os.fstat(descriptor).st_mode)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def unreadable(file: str, error: OSError, what: str = "") -> CheckpointError:
    """The error for a file that the system refuses; to be raised by the caller."""
    return CheckpointError(f"{file}: {what}cannot be read: {error.strerror or error}")


def _require_regular(file: str, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for test, name in _KINDS if test(mode)), "something else")
        raise CheckpointError(f"{file}: must be a regular file, is {kind}")


def read_all(file: str, limit: int) -> bytes:
    """The content of a file of at most `limit` bytes.

    Raises:
        CheckpointError: it is longer, no regular file, or cannot be read.
    """
    with open_regular(file) as stream:
        try:
            text = stream.read(limit + 1)
        except OSError as error:
            raise unreadable(file, error) from error
    if len(text) > limit:
        raise CheckpointError(f"{file}: must have at most {limit} bytes, got {os.path.getsize(file)}")
    return text


def parse_object(text: bytes, file: str, what: str = "", *, unique: str = "") -> dict[str, Any]:
    """A JSON object.

    Args:
        file, what: for messages: "<file>: <what>must be a JSON object".
        unique: what a key names where none may come twice, such as "tensor"; "": the last one counts.

    Raises:
        CheckpointError: the text is none, or exceeds a limit of `limits`.
    """

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if unique and len(result) != len(items):
            raise CheckpointError(f"{file}: {unique} {short(_first_repeated(items))} appears twice in the header")
        return result

    try:
        _check_nesting(text)
        value = json.loads(text.decode("utf-8"), object_pairs_hook=pairs, parse_int=_integer)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: {what}must be a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: {what}must be a JSON object, got {type(value).__name__}")
    return value


def _first_repeated(items: list[tuple[str, Any]]) -> str:
    seen: set[str] = set()
    for key, _ in items:
        if key in seen:
            return key
        seen.add(key)
    raise AssertionError("no key is repeated")


def _integer(text: str) -> int:
    if len(text) > MAX_NUMBER_DIGITS:
        raise ValueError(f"an integer must have at most {MAX_NUMBER_DIGITS} digits, got {len(text)}")
    return int(text)


def _check_nesting(text: bytes) -> None:
    """Few enough arrays and objects, not too deep in one another: the parser recurses and keeps each of them.

    Up to the first character that no JSON has, strings end here where they end for the parser.
    """
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    codes = np.frombuffer(text, np.uint8)
    in_string = np.add.accumulate(codes == ord('"'), dtype=np.uint8) & 1
    opens = ((codes == ord("[")) | (codes == ord("{"))) & (in_string == 0)
    closes = ((codes == ord("]")) | (codes == ord("}"))) & (in_string == 0)
    count = int(np.count_nonzero(opens))
    if count > MAX_JSON_CONTAINERS:
        raise ValueError(f"it must hold at most {MAX_JSON_CONTAINERS} arrays and objects, got {count}")
    steps = opens[opens | closes].astype(np.int32) * 2 - 1
    depth = int(np.add.accumulate(steps).max(initial=0))
    if depth > MAX_JSON_DEPTH:
        raise ValueError(f"it must be at most {MAX_JSON_DEPTH} arrays and objects deep, got {depth}")
