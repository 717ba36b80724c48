"""What a file of prepared weights must say before it is believed."""

from __future__ import annotations

import dataclasses
import urllib.parse
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import torch

from torch_moe_ops.backends import BACKENDS, Backend
from torch_moe_ops.core.activations import ACTIVATIONS, resolve_constants
from torch_moe_ops.core.problem import ACCURACIES, Problem
from torch_moe_ops.core.schemas import arguments
from torch_moe_ops.core.schemes import ACT_FORMATS, SCHEMES
from torch_moe_ops.files.errors import CheckpointError, short
from torch_moe_ops.files.serialization import check_types, plain_values
from torch_moe_ops.prepared.fields import PreparedFields
from torch_moe_ops.prepared.posed import KEPT_FIELDS
from torch_moe_ops.prepared.restoring import posed_of_tensors, sizes_of
from torch_moe_ops.prepared.tensors import PLAIN_FIELDS
from torch_moe_ops.weights.raw_weights import RawWeights

_MAX_SIZE = 2**31 - 1
_MESSAGE = 1000  # the most characters of an op's error

Prepared = TypeVar("Prepared", bound=PreparedFields)


def checked(kind: type[Prepared], file: str, fields: Mapping[str, Any]) -> Prepared:
    """The object: names that are known, a layout as this version has it, tensors that its op takes.

    Args:
        kind: PreparedWeights.
        fields: of the types that it declares.

    Raises:
        CheckpointError: naming `file`, the field, what it must be and what came.
    """
    _check_settings(file, fields)
    backend = BACKENDS[fields["backend"]]
    if fields["layout"] != backend.layout.name:
        what = f"{backend.layout.name!r} for backend {backend.name!r}"
        raise CheckpointError(f"{file}: layout must be {what}, got {short(repr(fields['layout']))}")
    w = kind(**fields)
    _check_raw(file, w)
    _check_layout(file, w, backend)
    _check_factors(file, w)
    _check_by_op(file, w, backend)
    if w.posed:
        _check_posed(file, w)
        return w
    try:  # a file of before the problem was kept
        return dataclasses.replace(w, posed=posed_of_tensors(w))
    except (ValueError, RuntimeError) as error:
        raise CheckpointError(f"{file}: {error}") from error


def _check_settings(file: str, fields: Mapping[str, Any]) -> None:
    """Names and sizes, as far as tensors do not show them."""
    known: dict[str, Mapping[str, Any]] = {
        "backend": BACKENDS,
        "scheme": SCHEMES,
        "activation": ACTIVATIONS,
        "act_format": ACT_FORMATS,
    }
    for name, allowed in known.items():
        if fields[name] not in allowed:
            raise CheckpointError(f"{file}: {name} must be one of {list(allowed)}, got {short(repr(fields[name]))}")
    multiple = SCHEMES[fields["scheme"]].size_multiple
    least = {"num_experts": 1, "num_local_experts": 1, "local_expert_offset": 0, "hidden_size": 1}
    for name, lowest in (least | {"intermediate_size": 1}).items():
        size, step = fields[name], multiple if name.endswith("_size") else 1
        if not lowest <= size <= _MAX_SIZE or size % step:
            text = f"be in {lowest}..{_MAX_SIZE}" + (f" and a multiple of {step}" if step > 1 else "")
            raise CheckpointError(f"{file}: {name} must {text}, got {short(size)}")
    shared, local = fields.get("num_shared_experts", 0), fields["num_local_experts"]
    if not 0 <= shared < local:
        raise CheckpointError(f"{file}: num_shared_experts must be in 0..{local - 1}, got {short(shared)}")
    try:
        resolve_constants(fields["activation"], *(fields[f"swiglu_{name}"] for name in ("alpha", "beta", "limit")))
    except ValueError as error:
        raise CheckpointError(f"{file}: swiglu_{error}") from error


def _check_raw(file: str, w: PreparedFields) -> None:
    """What else the raw weights said."""
    types = {f.name: str(f.type) for f in dataclasses.fields(RawWeights) if f.name in PLAIN_FIELDS}
    dtypes = {f"{name}_dtype": "torch.dtype | None" for name in ("w13_bias", "w2_bias")}
    said = _check_text(file, w, "raw", types | dtypes)
    if said["activation"] not in (None, *ACTIVATIONS):
        got = short(repr(said["activation"]))
        raise CheckpointError(f"{file}: raw activation must be None or one of {list(ACTIVATIONS)}, got {got}")
    for name in ("w13_bias", "w2_bias"):
        if (said[f"{name}_dtype"] is None) != (getattr(w, name) is None):
            there = "absent" if said[f"{name}_dtype"] is None else "present"
            raise CheckpointError(f"{file}: {name} must be {there}: its dtype was {said[f'{name}_dtype']}")


def _check_posed(file: str, w: PreparedFields) -> None:
    """What else the problem said."""
    types = {f.name: str(f.type) for f in dataclasses.fields(Problem) if f.name in KEPT_FIELDS}
    # Written before there was a choice: see kept_problem.py.
    said = _check_text(file, w, "posed", {"requested": "str"} | types, optional={"accuracy"})
    names = {"requested": ("auto", *BACKENDS), "input_scale": ("none", "tensor", "expert"), "accuracy": ACCURACIES}
    for name, allowed in names.items():
        if name in said and said[name] not in allowed:
            raise CheckpointError(f"{file}: posed {name} must be one of {list(allowed)}, got {short(repr(said[name]))}")


def _check_text(
    file: str, w: PreparedFields, field: str, types: Mapping[str, str], optional: Collection[str] = ()
) -> dict[str, Any]:
    """A field that holds plain values as URL-quoted JSON: exactly those of `types`, but for optional ones."""
    text = getattr(w, field)
    wrong = f"{file}: {field} must be what prepare writes, got {short(repr(text))}"
    try:
        said = plain_values(file, field, urllib.parse.unquote(text))
        if not types.keys() - optional <= said.keys() <= types.keys():
            raise CheckpointError(f"{sorted(types)} expected")
        check_types(file, said, types, f"{field} ")
    except CheckpointError as error:
        raise CheckpointError(f"{wrong} ({error})") from error
    return said


def _check_layout(file: str, w: PreparedFields, backend: Backend) -> None:
    """Codes, scales and biases for the logical sizes."""
    for name, (shapes, dtypes) in backend.layout.specs(SCHEMES[w.scheme], sizes_of(w)).items():
        tensor = getattr(w, name)
        if tensor is None and name.endswith("_bias"):
            continue
        got = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
        if tensor is None or tuple(tensor.shape) not in shapes or tensor.dtype not in dtypes:
            raise CheckpointError(f"{file}: {name} must have shape {shapes} and dtype {dtypes}, got {got}")


def _check_factors(file: str, w: PreparedFields) -> None:
    """The checkpoint's own factors, which no op reads."""
    experts, halves = w.num_local_experts, 2 if ACTIVATIONS[w.activation].is_gated else 1
    either: tuple[tuple[int, ...], ...] = ((), (experts,))
    shapes = {"a13_input_scale": either, "a2_input_scale": either}
    if SCHEMES[w.scheme].has_scale_2:
        shapes |= {"w13_scale_2": ((experts, halves), (experts, 1)), "w2_scale_2": ((experts,),)}
    for name in ("a13_input_scale", "a2_input_scale", "w13_scale_2", "w2_scale_2"):
        tensor = getattr(w, name)
        if tensor is None and (name.startswith("a") or name not in shapes):
            continue
        if name not in shapes:
            raise CheckpointError(f"{file}: {name} must be absent for scheme {w.scheme!r}, got a Tensor")
        got = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
        if tensor is None or tuple(tensor.shape) not in shapes[name] or tensor.dtype != torch.float32:
            raise CheckpointError(f"{file}: {name} must have shape {shapes[name]} and torch.float32, got {got}")


def _check_by_op(file: str, w: PreparedFields, backend: Backend) -> None:
    """Everything that a call would check, by a call without data."""
    meta, scheme = w.to("meta"), SCHEMES[w.scheme]
    dtype = w.w13.dtype if w.scheme == "none" else backend.hidden_dtypes[0]
    ids = torch.empty(1, 1, dtype=torch.int32, device="meta")
    hidden = torch.empty(1, w.hidden_size, dtype=dtype, device="meta")
    given: dict[str, Any] = {
        "hidden_states": hidden,
        "hidden_states_scale": None,
        "topk_ids": ids,
        "topk_weights": ids.float(),
    }
    given |= {"element": scheme.element, "out_dtype": None}
    op = f"{scheme.op_prefix}moe_routed"
    names, _ = arguments(op)
    try:
        getattr(torch.ops.moeq, op)(**{name: given[name] if name in given else getattr(meta, name) for name in names})
    except RuntimeError as error:  # it may repeat a text of the file
        raise CheckpointError(f"{file}: {short(str(error), _MESSAGE)}") from error
