"""For the checkpoint tests: fixtures, decoders that share no code with the library, and ways to damage a file."""

from __future__ import annotations

import json
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from paths import DATA
from safetensors.torch import load_file, save_file
from torch import Tensor

from torch_moe_ops.weights.raw_weights import RawWeights

FIXTURES = DATA / "checkpoints"
NVFP4_FIXTURES = sorted(folder.name for folder in FIXTURES.iterdir() if "nvfp4" in folder.name)

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


def _e4m3_table() -> np.ndarray:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    value = np.where((code & 127) == 127, np.nan, value)
    return np.where(code & 128, -value, value).astype(np.float32)


E4M3 = _e4m3_table()


def bytes_of(tensor: Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy()


def e2m1_values(packed: Tensor) -> np.ndarray:
    """[..., K/2] bytes, low nibble first -> float32 [..., K]."""
    codes = bytes_of(packed)
    return E2M1[np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)]


def e4m3_values(tensor: Tensor) -> np.ndarray:
    return E4M3[bytes_of(tensor)]


def e8m0_values(tensor: Tensor) -> np.ndarray:
    return np.ldexp(np.float32(1), bytes_of(tensor).astype(np.int32) - 127).astype(np.float32)


def int4_codes(words: Tensor) -> np.ndarray:
    """int32 [..., K/8], nibble i of word j = code 8j+i -> [..., K] in 0..15."""
    codes = words.contiguous().numpy().view(np.uint32)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
    return codes.reshape(*codes.shape[:-2], -1).astype(np.int32)


def floats(tensor: Tensor) -> np.ndarray:
    return tensor.to(torch.float32).numpy()


def _along_k(scale: np.ndarray, k: int) -> np.ndarray:
    return np.repeat(scale, k // scale.shape[-1], axis=-1)


def _per_half(scale: Tensor, rows: int) -> np.ndarray:
    """[E, halves] -> [E, rows, 1]."""
    return np.repeat(floats(scale), rows // scale.shape[1], axis=1)[..., None]


def _tiles(scale: np.ndarray, rows: int, k: int, halves: int) -> np.ndarray:
    """128x128 tiles, gate and up tiled separately -> [rows, k]."""
    pieces = [np.repeat(np.repeat(s, 128, 0)[: rows // halves], 128, 1)[:, :k] for s in np.split(scale, halves)]
    return np.concatenate(pieces)


def decode(raw: RawWeights, which: str, expert: int) -> np.ndarray:
    """What one expert's matrix means, float32 [rows, K], by the formulas of the formats."""
    weight = getattr(raw, which)[expert]
    scale_tensor = getattr(raw, f"{which}_scale")
    scale = None if scale_tensor is None else scale_tensor[expert : expert + 1]
    rows = weight.shape[0]
    if raw.scheme == "none":
        return floats(weight)
    assert scale is not None
    if raw.scheme == "nvfp4":
        scale_2 = getattr(raw, f"{which}_scale_2").reshape(raw.num_experts, -1)[expert : expert + 1]
        codes = e2m1_values(weight)
        return codes * _along_k(e4m3_values(scale[0]) * _per_half(scale_2, rows)[0], codes.shape[-1])
    if raw.scheme == "mxfp4":
        codes = e2m1_values(weight)
        return codes * _along_k(e8m0_values(scale[0]), codes.shape[-1])
    if raw.scheme == "mxfp8":
        return e4m3_values(weight) * _along_k(e8m0_values(scale[0]), weight.shape[-1])
    if raw.scheme in ("int4", "mxint4"):
        zeros = getattr(raw, f"{which}_zero_point")
        codes = int4_codes(weight)
        zero = 8 if zeros is None else _along_k(zeros[expert].numpy().astype(np.int32), codes.shape[-1])
        return (codes - zero).astype(np.float32) * _along_k(floats(scale[0]), codes.shape[-1])
    if raw.scheme == "fp8":
        factor = floats(scale[0]) if scale.ndim == 3 else _per_half(scale, rows)[0]
        return e4m3_values(weight) * factor
    if raw.scheme == "fp8_block":
        halves = 2 if which == "w13" and raw.is_gated else 1
        return e4m3_values(weight) * _tiles(floats(scale[0]), rows, weight.shape[1], halves)
    assert raw.scheme == "int8", raw.scheme
    zeros = getattr(raw, f"{which}_zero_point")
    codes = weight.numpy().astype(np.float32)
    if zeros is not None:
        codes = codes - _along_k(zeros[expert].numpy().astype(np.float32), codes.shape[-1])
    return codes * _along_k(floats(scale[0]), codes.shape[-1])


def expected(name: str) -> dict[str, Tensor]:
    return load_file(FIXTURES / name / "expected.safetensors")


def expected_layers(name: str) -> list[int]:
    return sorted({int(key.split(".")[1]) for key in expected(name) if key.endswith("w2_deq_e0")})


def stored(name: str) -> dict[str, Tensor]:
    """Every tensor of a fixture, by the safetensors package."""
    tensors: dict[str, Tensor] = {}
    for file in sorted((FIXTURES / name).glob("model*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def config_of(name: str) -> dict[str, Any]:
    return json.loads((FIXTURES / name / "config.json").read_text())


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any] | None = None) -> Path:
    """A checkpoint of one file."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: t.clone(memory_format=torch.contiguous_format) for name, t in tensors.items()},
        folder / "model.safetensors",
    )
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def changed(folder: Path, name: str, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """A copy of a fixture whose tensors `change` has altered, as one file."""
    tensors = stored(name)
    change(tensors)
    return write(folder / name, tensors, config_of(name))


def copied(folder: Path, name: str) -> Path:
    """A writable copy of a fixture, file by file."""
    target = folder / name
    target.mkdir(parents=True)
    for file in (FIXTURES / name).iterdir():
        if not file.name.startswith("expected"):
            shutil.copyfile(file, target / file.name)
    return target


def raw_file(folder: Path, header: object, data: bytes = b"", *, length: int | None = None) -> Path:
    """A folder whose model.safetensors has just this header (an object, or its text) and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return file


class TooSlow(BaseException):
    """Not an Exception: no code under test may take it for an error of its own."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """TooSlow once this process has computed for so long (time that others take on a shared core does not count)."""

    def stop(*_):
        raise TooSlow(f"more than {seconds} s of computing")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
