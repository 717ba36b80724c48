"""Backends as on a machine where every one was built."""

from __future__ import annotations

import dataclasses

import pytest

from torch_moe_ops.backends import BACKENDS


def install_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which devices and layers each backend takes stays as it is."""
    for name, backend in list(BACKENDS.items()):
        kept = tuple(r for r in backend.requires if not r.of_machine)
        monkeypatch.setitem(BACKENDS, name, dataclasses.replace(backend, requires=kept))
