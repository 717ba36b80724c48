"""The problem that prepared weights keep, as text: torch.export takes strings, not objects.

Their tensors do not tell it: a layout packs scales so that those of rows and of groups look alike.
"""

from __future__ import annotations

import dataclasses
import json
import urllib.parse

from torch_moe_ops.core.problem import Problem
from torch_moe_ops.prepared.fields import PreparedFields

# What no other field of PreparedWeights says, and is not of the device, which `to` changes.
KEPT_FIELDS = tuple(
    f.name
    for f in dataclasses.fields(Problem)
    if f.name not in {own.name for own in dataclasses.fields(PreparedFields)} | {"device", "capability"}
)


def to_text(problem: Problem, requested: str) -> str:
    """URL-quoted JSON: torch.export writes strings into source code without escaping them."""
    kept = {name: getattr(problem, name) for name in KEPT_FIELDS}
    kept["dtype"] = None if problem.dtype is None else str(problem.dtype).removeprefix("torch.")
    return urllib.parse.quote(json.dumps({"requested": requested, **kept}))
