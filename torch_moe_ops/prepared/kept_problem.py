"""The problem that prepared weights keep, as text: torch.export takes strings, not objects.

Their tensors do not tell it: a layout packs scales so that those of rows and of groups look alike.
"""

from __future__ import annotations

import dataclasses
import json
import urllib.parse
from collections.abc import Mapping
from typing import Any

import torch

from torch_moe_ops.backends.registry import Problem
from torch_moe_ops.prepared.prepared_weights import PreparedWeights

# What no other field of PreparedWeights says, and is not of the device, which `to` changes.
KEPT_FIELDS = tuple(
    f.name
    for f in dataclasses.fields(Problem)
    if f.name not in {own.name for own in dataclasses.fields(PreparedWeights)} | {"device", "capability"}
)


def to_text(problem: Problem, requested: str) -> str:
    """URL-quoted JSON: torch.export writes strings into source code without escaping them."""
    kept = {name: getattr(problem, name) for name in KEPT_FIELDS}
    kept["dtype"] = None if problem.dtype is None else str(problem.dtype).removeprefix("torch.")
    return urllib.parse.quote(json.dumps({"requested": requested, **kept}))


def requested_of(w: PreparedWeights) -> str:
    """The backend that `prepare` was asked for: a name, or "auto"."""
    requested: str = _values(w)["requested"]
    return requested


def problem_of_prepared(w: PreparedWeights) -> Problem:
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


def device_fields(device: torch.device) -> dict[str, Any]:
    """`device` and `capability` of a Problem."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return {"device": device.type, "capability": capability}


def _values(w: PreparedWeights) -> Mapping[str, Any]:
    from torch_moe_ops.prepared.restoring import posed_of_tensors

    # Objects of before the problem was kept (pickled, say) have none.
    values: Mapping[str, Any] = json.loads(urllib.parse.unquote(w.posed or posed_of_tensors(w)))
    return values
