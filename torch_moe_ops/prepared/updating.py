"""update_: new raw weights into the tensors of a prepared layer."""

from __future__ import annotations

import dataclasses
import json
import urllib.parse
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch

from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.core.problem import Problem
from torch_moe_ops.prepared.fields import PreparedFields
from torch_moe_ops.prepared.kept_problem import problem_of_prepared
from torch_moe_ops.prepared.problem import problem_of
from torch_moe_ops.prepared.tensors import plain_values, tensors_of
from torch_moe_ops.weights.raw_weights import RawWeights


class Derived(Protocol):
    """What was made of prepared weights, and is not theirs."""

    def renew(self) -> None:
        """Make it again, of what they hold now."""


_DERIVED: WeakKeyDictionary[PreparedFields, WeakSet[Derived]] = WeakKeyDictionary()


def follow(w: PreparedFields, derived: Derived) -> None:
    """From now on `derived` is renewed whenever `w` was updated, as long as both live."""
    _DERIVED.setdefault(w, WeakSet()).add(derived)


@torch.no_grad()
def update(w: PreparedFields, raw: RawWeights) -> None:
    """Copy what `prepare` would make of `raw` into the tensors of `w`. raw: this rank's share of the experts."""
    settings = {
        name: value for name, value in w.metadata().items() if name not in ("backend", "layout", "raw", "posed")
    }
    for name, mine, other in (
        ("scheme", w.scheme, raw.scheme),
        ("num_experts", w.num_local_experts, raw.num_experts),
        ("num_shared_experts", w.num_shared_experts, raw.num_shared_experts),
        ("hidden_size", w.hidden_size, raw.hidden_size),
        ("intermediate_size", w.intermediate_size, raw.intermediate_size),
    ):
        if mine != other:
            raise ValueError(f"update_: {name} must be {mine!r} as prepared, got {other!r}")
    _check_plain_values(w, raw)
    new, old = tensors_of(raw, BACKENDS[w.backend], settings, w.device), w.tensors()
    if new.keys() != old.keys():
        raise ValueError(f"update_: tensors must be {sorted(old)} as prepared, got {sorted(new)}")
    for name, tensor in new.items():
        if tensor.shape != old[name].shape or tensor.dtype != old[name].dtype:
            expected = f"{tuple(old[name].shape)} {old[name].dtype}"
            got = f"{tuple(tensor.shape)} {tensor.dtype}"
            raise ValueError(f"update_: {name} must be {expected} as prepared, got {got}")
    old_problem = problem_of_prepared(w)
    _check_problem(old_problem, problem_of(raw, settings, w.device, old_problem.accuracy, old_problem.dtype))
    for name, tensor in new.items():
        old[name].copy_(tensor)
    for derived in tuple(_DERIVED.get(w, ())):
        derived.renew()


def _check_problem(old: Problem, new: Problem) -> None:
    """What a layout packs alike may still be another problem: scales of rows, or of one long group."""
    for name in (f.name for f in dataclasses.fields(Problem)):
        if getattr(new, name) != getattr(old, name):
            raise ValueError(f"update_: {name} must be {getattr(old, name)!r} as prepared, got {getattr(new, name)!r}")


def _check_plain_values(w: PreparedFields, raw: RawWeights) -> None:
    """What RawWeights says besides its tensors must still hold; only where it was read from may change."""
    old, new = (json.loads(urllib.parse.unquote(text)) for text in (w.raw, plain_values(raw)))
    for name in old:
        if name != "source" and old[name] != new[name]:
            raise ValueError(f"update_: {name} must be {old[name]!r} as prepared, got {new[name]!r}")
