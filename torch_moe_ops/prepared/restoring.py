"""restore and update: from a backend's layout back to raw weights, and new raw weights into it."""

from __future__ import annotations

import dataclasses
import json
import urllib.parse
from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.backends.registry import Problem, Sizes
from torch_moe_ops.core.activations import ACTIVATIONS
from torch_moe_ops.core.schemes import SCHEMES
from torch_moe_ops.prepared.kept_problem import to_text
from torch_moe_ops.prepared.prepare import KEPT, own_memory, plain_values, problem_of, tensors_of
from torch_moe_ops.prepared.prepared_weights import PreparedWeights
from torch_moe_ops.weights.raw_weights import RawWeights


def sizes_of(w: PreparedWeights) -> Sizes:
    """The logical sizes of a prepared layer."""
    gated = ACTIVATIONS[w.activation].is_gated
    return Sizes(w.num_local_experts, w.hidden_size, w.intermediate_size, gated, w.w13.dtype)


def posed_of_tensors(w: PreparedWeights) -> str:
    """`w.posed` for weights that came without it, from what the checkpoint's tensors were; asked for as "auto"."""
    # Folded weights, of this scheme alone, cannot be restored; and its block scales decide nothing.
    source: Any = w if w.scheme == "nvfp4" else restored_views(w)
    return to_text(problem_of(source, w.metadata(), w.device), "auto")


@torch.no_grad()
def restore(w: PreparedWeights) -> RawWeights:
    """The raw weights that `prepare` took (this rank's share of them), bit for bit, in memory of their own.

    So they stay what they are where `update_` writes into `w`.
    """
    tensors, plain = _parts(w)
    return RawWeights(scheme=w.scheme, **own_memory(tensors, w.tensors()), **plain)  # type: ignore[arg-type]


def restored_views(w: PreparedWeights) -> RawWeights:
    """`restore` without its copies: what the backend keeps as it came is memory of `w`. To be read, then dropped."""
    tensors, plain = _parts(w)
    return RawWeights(scheme=w.scheme, **tensors, **plain)  # type: ignore[arg-type]


def _parts(w: PreparedWeights) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The fields of RawWeights besides the scheme: tensors, some of them memory of `w`, and plain values."""
    backend = BACKENDS[w.backend]
    arguments = {name: t for name, t in w.tensors().items() if name.split("_")[0] in ("w13", "w2")}
    for name in ("w13_bias", "w2_bias", "w13_scale_2", "w2_scale_2"):
        arguments.pop(name, None)
    tensors = backend.restore(SCHEMES[w.scheme], arguments, sizes_of(w))
    tensors |= {name: value for name in KEPT if (value := getattr(w, name)) is not None}
    plain = json.loads(urllib.parse.unquote(w.raw))
    for name, rows in (("w13_bias", w.intermediate_size), ("w2_bias", w.hidden_size)):
        dtype, bias = plain.pop(f"{name}_dtype"), getattr(w, name)
        if bias is not None:
            halves = 2 if name == "w13_bias" and ACTIVATIONS[w.activation].is_gated else 1
            if backend.bias_layout is not None:
                bias = backend.bias_layout.undo(name, bias, halves)
            kept = bias.unflatten(1, (halves, -1))[:, :, :rows].flatten(1)
            tensors[name] = kept.to(getattr(torch, dtype))
    return tensors, plain


@torch.no_grad()
def update(w: PreparedWeights, raw: RawWeights) -> None:
    """Copy what `prepare` would make of `raw` into the tensors of `w`. raw: this rank's share of the experts."""
    settings = {
        name: value for name, value in w.metadata().items() if name not in ("backend", "layout", "raw", "posed")
    }
    for name, mine, other in (
        ("scheme", w.scheme, raw.scheme),
        ("num_experts", w.num_local_experts, raw.num_experts),
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
    _check_problem(w.problem, problem_of(raw, settings, w.device))
    for name, tensor in new.items():
        old[name].copy_(tensor)


def _check_problem(old: Problem, new: Problem) -> None:
    """What a layout packs alike may still be another problem: scales of rows, or of one long group."""
    for name in (f.name for f in dataclasses.fields(Problem)):
        if getattr(new, name) != getattr(old, name):
            raise ValueError(f"update_: {name} must be {getattr(old, name)!r} as prepared, got {getattr(new, name)!r}")


def _check_plain_values(w: PreparedWeights, raw: RawWeights) -> None:
    """What RawWeights says besides its tensors must still hold; only where it was read from may change."""
    old, new = (json.loads(urllib.parse.unquote(text)) for text in (w.raw, plain_values(raw)))
    for name in old:
        if name != "source" and old[name] != new[name]:
            raise ValueError(f"update_: {name} must be {old[name]!r} as prepared, got {new[name]!r}")
