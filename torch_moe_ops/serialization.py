"""Frozen dataclasses of tensors and plain values as .safetensors files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def write(path: str | Path, tensors: dict[str, Tensor], plain: dict[str, Any], version: int) -> None:
    """Tensors as they are, plain values as JSON in the header."""
    from safetensors.torch import save_file

    header = {"moeq_format": str(version), "moeq": json.dumps(plain)}
    save_file({name: t.detach().contiguous() for name, t in tensors.items()}, str(path), metadata=header)


def read(
    path: str | Path, device: torch.device | str, kind: type, version: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Plain values and tensors for the dataclass `kind`; ValueError names the path and what is wrong."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt", device=str(device)) as file:
            header = file.metadata() or {}
            tensors: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path}: not a safetensors file: {error}") from None
    got = header.get("moeq_format")
    if got != str(version):
        raise ValueError(f"{path}: moeq_format must be {version}, got {got!r}")
    try:
        plain = json.loads(header.get("moeq", ""))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: the plain values in the header must be JSON, got {error}") from None
    fields = {f.name: f for f in dataclasses.fields(kind)}
    unknown = sorted((plain.keys() | tensors.keys()) - fields.keys())
    required = (n for n, f in fields.items() if f.default is dataclasses.MISSING)
    missing = sorted(set(required) - plain.keys() - tensors.keys())
    if unknown or missing:
        raise ValueError(f"{path}: fields of {kind.__name__} must match, unknown {unknown}, missing {missing}")
    return plain, tensors
