"""with_shared_experts: experts that every token goes to, and those that its router chooses, in one set of weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.core.same_bits import same_bits
from torch_moe_ops.weights.raw_weights import RawWeights
from torch_moe_ops.weights.sharding import part_of_intermediate, unit_of_intermediate

_PLAIN = ("activation", "swiglu_alpha", "swiglu_beta", "swiglu_limit")
_INPUT_SCALES = ("a13_input_scale", "a2_input_scale")


def with_shared_experts(raw: RawWeights, shared: RawWeights) -> RawWeights:
    """The experts of `raw`, and those of `shared` behind them, which every token goes to.

    A shared expert whose intermediate size is n times that of the routed ones becomes n experts: their results add up
    to its own, but for the order of summation, and for schemes whose activations get one dynamic scale a row, which
    is then one for each part. Of several that are divided, the first parts of all come first, then the second parts of
    all: gates [num_tokens, s] become gates.repeat(1, n). `route(..., num_shared_experts=)` and `fused_moe` choose them
    for every token.

    Args:
        raw: routed experts, all of a layer. Neither it nor `shared` is modified.
        shared: of the same scheme, hidden size, dtypes and kinds of scales. Its activation, where it says one, is
            raw's. Calibrated input scales that differ become one for each expert.

    Returns: RawWeights of raw.num_experts + n experts with num_shared_experts = n, in memory of their own.
    Raises: ValueError naming what must be the same and is not, or the intermediate size that is no multiple;
        TypeError: not RawWeights.
    """
    for name, value in (("raw", raw), ("shared", shared)):
        if not isinstance(value, RawWeights):
            raise TypeError(f"with_shared_experts: {name} must be RawWeights, got {type(value).__name__}")
        if value.num_shared_experts:
            text = "be without shared experts (give all of them at once)"
            raise ValueError(f"with_shared_experts: {name} must {text}, got {value.num_shared_experts} of them")
    _check_alike(raw, shared)
    parts = _parts(shared, raw.intermediate_size)
    tensors = {name: _joined(name, raw, parts) for name in raw.tensors()}
    changes: dict[str, Any] = tensors | (_said(raw) or _said(shared))
    added = sum(part.num_experts for part in parts)
    return dataclasses.replace(raw, num_shared_experts=added, **changes)


def _check_alike(raw: RawWeights, shared: RawWeights) -> None:
    for name in ("scheme", "hidden_size", "is_gated", "device"):
        _require(name, getattr(raw, name), getattr(shared, name))
    if _said(raw) and _said(shared):
        _require("activation", _said(raw), _said(shared))
    mine, theirs = raw.tensors(), shared.tensors()
    for name in sorted(mine.keys() | theirs.keys()):
        there = [name in tensors for tensors in (mine, theirs)]
        if there[0] != there[1]:
            texts = ["given" if is_there else "absent" for is_there in there]
            _require(name, *texts)
        _require(f"dtype of {name}", mine[name].dtype, theirs[name].dtype)
        if name not in _INPUT_SCALES:
            _require(f"dimensions of {name}", mine[name].ndim, theirs[name].ndim)


def _require(name: str, mine: object, theirs: object) -> None:
    if mine != theirs:
        raise ValueError(f"with_shared_experts: {name} of shared must be {mine}, as of the routed ones, got {theirs}")


def _parts(shared: RawWeights, size: int) -> list[RawWeights]:
    """`shared` as experts of the intermediate size of the routed ones; an expert's parts are not neighbours."""
    unit = unit_of_intermediate(shared)
    if shared.intermediate_size % size:
        text = f"be a multiple of the routed experts' {size}"
        raise ValueError(
            f"with_shared_experts: intermediate_size of shared must {text}, got {shared.intermediate_size}"
        )
    if shared.intermediate_size == size:
        return [shared]
    if size % unit:
        what = f"{unit}, what shares a scale or a storage element in {shared.scheme} weights"
        text = f"intermediate_size of the routed experts must be a multiple of {what}, to divide a shared expert"
        raise ValueError(f"with_shared_experts: {text}, got {size}")
    parts = [part_of_intermediate(shared, start, size) for start in range(0, shared.intermediate_size, size)]
    if shared.w2_bias is not None:  # added once
        zeros = torch.zeros_like(shared.w2_bias)
        parts[1:] = [dataclasses.replace(part, w2_bias=zeros) for part in parts[1:]]
    return parts


def _joined(name: str, raw: RawWeights, parts: list[RawWeights]) -> Tensor:
    """One field of all experts."""
    mine: Tensor = getattr(raw, name)
    theirs: list[Tensor] = [getattr(part, name) for part in parts]
    if name in _INPUT_SCALES:
        if not mine.ndim and all(same_bits(mine, one) for t in theirs for one in t.reshape(-1)):
            return mine.clone()
        every = zip((raw, *parts), (mine, *theirs), strict=True)
        return torch.cat([t.expand(experts.num_experts) for experts, t in every])
    rows = max(t.shape[1] for t in (mine, *theirs)) if name == "w13_scale_2" else 0
    if rows:  # one for gate and up, or one for each
        mine, *theirs = (t.expand(-1, rows) for t in (mine, *theirs))
    for t in theirs:
        _require(f"shape of {name}", tuple(mine.shape[1:]), tuple(t.shape[1:]))
    # Not every device concatenates float8.
    stored = [t.view(torch.uint8) if t.element_size() == 1 else t for t in (mine, *theirs)]
    return torch.cat(stored).view(mine.dtype)


def _said(raw: RawWeights) -> dict[str, Any]:
    """The activation and its constants, {} where nothing is said of them."""
    return {name: value for name in _PLAIN if (value := getattr(raw, name)) is not None}
