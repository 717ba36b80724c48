"""Prepared weights as entries of a state_dict: their tensors, and what else they say as the bytes of a text."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_moe_ops.files.serialization import plain_fields
from torch_moe_ops.prepared.prepared_file import checked
from torch_moe_ops.prepared.prepared_weights import PreparedWeights
from torch_moe_ops.prepared.restoring import restored_views

SETTINGS = "settings"  # uint8 [n]: a state_dict that is to become a safetensors file holds tensors only


def state_of(w: PreparedWeights) -> dict[str, Tensor]:
    """By name; the tensors are those of `w`."""
    text = json.dumps(w.metadata()).encode()
    return w.tensors() | {SETTINGS: torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())}


def prepared_of(where: str, state: Mapping[str, Tensor]) -> PreparedWeights:
    """Inverse of `state_of`, with the tensors that are given.

    Raises: CheckpointError, a ValueError naming `where`, for what `state_of` does not give.
    """
    tensors = {name: t for name, t in state.items() if name != SETTINGS}
    text = bytes(state[SETTINGS].cpu().to(torch.uint8).tolist()).decode("utf-8", "replace")
    plain = plain_fields(where, PreparedWeights, text, tensors)
    return checked(PreparedWeights, where, {**plain, **tensors})


@torch.no_grad()
def take_over(w: PreparedWeights, given: PreparedWeights) -> None:
    """Copy the values of `given` into the tensors of `w`, which may have another layout, on another device.

    Raises: ValueError where `w` was prepared for another problem than `given`.
    """
    if w.device.type == "meta":
        raise ValueError("experts on the meta device have no memory to load into: give assign=True")
    if _said(w) == _said(given):
        mine = w.tensors()
        for name, tensor in given.tensors().items():
            mine[name].copy_(tensor)
        return
    _require_same(w, given, _MEANING)
    w.update_(restored_views(given))


def require_same_layer(w: PreparedWeights, given: PreparedWeights) -> None:
    """For what takes the place of `w` as it is: of any scheme, layout and device, but of the same layer.

    Raises: ValueError naming what differs.
    """
    _require_same(w, given, (*_MEANING, "num_local_experts", "hidden_size", "intermediate_size"))


def _require_same(w: PreparedWeights, given: PreparedWeights, names: tuple[str, ...]) -> None:
    for name in names:
        mine, theirs = getattr(w, name), getattr(given, name)
        if mine != theirs:
            raise ValueError(f"state_dict: {name} must be {mine!r} as prepared, got {theirs!r}")


# What `update_` takes from `w`. How activations are quantized is a choice of whoever prepared `w`.
_MEANING = (
    "activation",
    "swiglu_alpha",
    "swiglu_beta",
    "swiglu_limit",
    "num_experts",
    "num_shared_experts",
    "local_expert_offset",
    "router_weight_on_input",
)


def _said(w: PreparedWeights) -> dict[str, Any]:
    """Everything but where it came from, and which tensors there are."""
    raw = {**json.loads(urllib.parse.unquote(w.raw)), "source": ""}
    return {**w.metadata(), "raw": raw, "shapes": {name: (t.shape, t.dtype) for name, t in w.tensors().items()}}
