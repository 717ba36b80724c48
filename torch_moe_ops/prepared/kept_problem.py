"""The problem and the wish that prepared weights keep, read again."""

from __future__ import annotations

import dataclasses
import json
import urllib.parse
from collections.abc import Mapping
from typing import Any

import torch

from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.core.problem import Problem
from torch_moe_ops.prepared.fields import PreparedFields
from torch_moe_ops.prepared.posed import KEPT_FIELDS
from torch_moe_ops.prepared.problem import device_fields
from torch_moe_ops.prepared.restoring import posed_of_tensors


def requested_of(w: PreparedFields) -> str:
    """The backend that `prepare` was asked for: a name, or "auto"."""
    requested: str = _values(w)["requested"]
    return requested


def accuracy_of(w: PreparedFields) -> str:
    """The accuracy that `prepare` was asked for."""
    accuracy: str = _values(w)["accuracy"]
    return accuracy


def problem_of_prepared(w: PreparedFields) -> Problem:
    """The problem that `prepare` had, on the device where the tensors are now."""
    kept = _values(w)
    shared = {f.name for f in dataclasses.fields(Problem)} & w.metadata().keys()
    return Problem(
        **{name: getattr(w, name) for name in shared},
        **device_fields(w.device),
        **{name: kept[name] for name in KEPT_FIELDS if name not in ("dtype", "constants")},
        dtype=None if kept["dtype"] is None else getattr(torch, kept["dtype"]),
        constants=None if kept["constants"] is None else tuple(kept["constants"]),
    )


def _values(w: PreparedFields) -> Mapping[str, Any]:
    # Objects of before the problem was kept (pickled, say) have none.
    values: Mapping[str, Any] = json.loads(urllib.parse.unquote(w.posed or posed_of_tensors(w)))
    # Nor had problems an accuracy at first: the backend's own, so that preparing again gets nothing farther off.
    return {"accuracy": BACKENDS[w.backend].accuracy, **values}
