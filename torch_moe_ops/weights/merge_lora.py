"""merge_lora: what adapters of experts learned, added to the experts and quantized again."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_moe_ops.core.schemes import FLOATS
from torch_moe_ops.weights.quantize_experts import dequantize_expert
from torch_moe_ops.weights.raw_weights import RawWeights
from torch_moe_ops.weights.requantize import largest_values, matrix_scale, requantize, scale_for


@torch.no_grad()
def merge_lora(
    raw: RawWeights,
    a13: Tensor | None = None,
    b13: Tensor | None = None,
    a2: Tensor | None = None,
    b2: Tensor | None = None,
    *,
    scaling: float,
) -> RawWeights:
    """Experts with low-rank adapters merged into them: quantize(dequantize(W) + scaling * B @ A), in the same scheme.

    The sum is rounded once to float32 and quantized by the quantizers of `quantize_experts`, into tensors of the same
    shapes and dtypes: group sizes, dtypes of scales, zero points and scales per tensor, half or channel stay what they
    are. Scales of whole matrices (nvfp4's scale_2, fp8's per tensor) that gate and up have in common stay common, and
    so do those that all experts have in common.

    Args:
        raw: any scheme, "none" too. Not written to.
        a13, b13: [num_experts, r, hidden_size] and [num_experts, rows of w13, r], rows gate then up: both, or neither
            to keep w13. bfloat16, float16 or float32, on raw's device.
        a2, b2: [num_experts, r, intermediate_size] and [num_experts, hidden_size, r], for w2. r may differ from a13's.
        scaling: multiplies both products: lora_alpha / r, or lora_alpha / sqrt(r) with rank-stabilized LoRA.

    Returns: RawWeights with raw's biases, activation, input scales and source. An expert whose A or B is all zeros
        keeps its codes and scales bit for bit, unless a scale that all experts have in common had to change; a
        projection without adapters keeps raw's own tensors. Calibrated input scales stay, though w2's were
        measured before w13 changed. Peak memory beyond the result is about one expert in float64.

    Raises:
        TypeError, ValueError: naming the argument, what it must be and what came: an A without its B, shapes, dtypes,
            devices, values that are not finite, also those of a merged expert as it is stored.
    """
    if not isinstance(raw, RawWeights):
        raise TypeError(f"merge_lora: raw must be RawWeights, got {type(raw).__name__}")
    if isinstance(scaling, bool) or not isinstance(scaling, (int, float)) or not math.isfinite(scaling):
        raise ValueError(f"merge_lora: scaling must be a finite number, got {scaling!r}")
    adapters = [_adapter(raw, *given) for given in (("w13", a13, b13), ("w2", a2, b2))]
    if not any(adapters):
        raise ValueError("merge_lora: a13 and b13, or a2 and b2, must be given, got none of them")
    changes: dict[str, Any] = {}
    for adapter in adapters:
        if adapter is not None and scaling:
            changes |= _merge(raw, adapter, float(scaling))
    return dataclasses.replace(raw, **changes)


class _Adapter(NamedTuple):
    """Checked factors of one projection."""

    name: str
    a: Tensor
    b: Tensor

    def changed(self) -> list[bool]:
        """By expert, whether its product can be other than zero."""
        changed: list[bool] = (self.a.flatten(1).any(1) & self.b.flatten(1).any(1)).tolist()
        return changed

    def merged(self, raw: RawWeights, e: int, scaling: float) -> Tensor:
        """One expert's matrix in float32. In float64 until there, whatever torch may do to products in float32."""
        product = (self.b[e].double() @ self.a[e].double()).mul_(scaling)
        return product.add_(dequantize_expert(raw, self.name, e)).float()


def _adapter(raw: RawWeights, name: str, a: Tensor | None, b: Tensor | None) -> _Adapter | None:
    if a is None and b is None:
        return None
    first, second = name.replace("w", "a"), name.replace("w", "b")
    if a is None or b is None:
        here, missing = (first, second) if b is None else (second, first)
        raise ValueError(f"merge_lora: {first} and {second} must be given together, got {here} without {missing}")
    rows = getattr(raw, name).shape[1]
    k = raw.hidden_size if name == "w13" else raw.intermediate_size
    rank = a.shape[1] if isinstance(a, Tensor) and a.ndim == 3 else 0
    _check(raw, first, a, (raw.num_experts, rank or "r", k), "r at least 1")
    _check(raw, second, b, (raw.num_experts, rows, rank), f"the r of {first}")
    return _Adapter(name, a, b)


def _check(raw: RawWeights, name: str, factor: Tensor, shape: tuple[int | str, ...], rank: str) -> None:
    if not isinstance(factor, Tensor):
        raise TypeError(f"merge_lora: {name} must be a Tensor, got {type(factor).__name__}")
    if tuple(factor.shape) != shape:
        sizes = ", ".join(map(str, shape))
        raise ValueError(f"merge_lora: {name} must have shape ({sizes}), {rank}, got {tuple(factor.shape)}")
    if factor.dtype not in FLOATS:
        raise TypeError(f"merge_lora: {name} must have a dtype of {[str(d) for d in FLOATS]}, got {factor.dtype}")
    if factor.device != raw.device:
        raise ValueError(f"merge_lora: {name} must be on {raw.device} like w13, got {factor.device}")
    _require_finite(factor, name)


def _require_finite(values: Tensor, what: str) -> None:
    if not bool(values.isfinite().all()):
        at = (~values.isfinite()).nonzero()[0].tolist()
        raise ValueError(f"merge_lora: {what} must be finite, got {values[tuple(at)].item()} at {at}")


def _merge(raw: RawWeights, adapter: _Adapter, scaling: float) -> dict[str, Tensor]:
    """The new tensors of one projection, an expert at a time into what is returned."""
    changed = adapter.changed()
    if not any(changed):
        return {}
    name = adapter.name
    scales = _MatrixScales.of(raw, adapter, scaling)
    fields = [field for field in raw.tensors() if field.removeprefix(name) in _PARTS]
    new = {field: torch.empty_like(getattr(raw, field), memory_format=torch.contiguous_format) for field in fields}
    for e, is_changed in enumerate(changed):
        if not (is_changed or scales.change_for_all):
            for field in fields:
                new[field][e] = getattr(raw, field)[e]
            continue
        merged = adapter.merged(raw, e, scaling)
        _require_finite(merged, f"merged {name} of expert {e}")
        for part, tensor in requantize(raw, name, merged, scales.of_expert(merged)).items():
            if tensor.dtype in FLOATS:
                _require_finite(tensor, f"{name}{part} of merged expert {e} in {tensor.dtype}")
            before = getattr(raw, f"{name}{part}")[e]
            new[f"{name}{part}"][e] = _settled(tensor, before) if part and tensor.dtype == torch.float32 else tensor
    return new


# What of a projection quantization makes, by what follows its name.
_PARTS = ("", "_scale", "_scale_2", "_zero_point")


class _MatrixScales(NamedTuple):
    """Where the scales of whole matrices of one projection come from."""

    scheme: str
    old: Tensor | None  # [num_experts, 1 or 2]; None: this projection has none
    common: Tensor | None = None  # [1 or 2]: the new one of all experts, where they had one

    @staticmethod
    def of(raw: RawWeights, adapter: _Adapter, scaling: float) -> _MatrixScales:
        """Sharing is as in raw; a scale of all experts takes a pass over all of them."""
        scales = _MatrixScales(raw.scheme, matrix_scale(raw, adapter.name))
        old = scales.old
        if old is None or raw.num_experts == 1 or not torch.equal(old, old[:1].expand_as(old)):
            return scales
        largest = [largest_values(adapter.merged(raw, e, scaling), old.shape[1]) for e in range(raw.num_experts)]
        new = _settled(scales.new(torch.stack(largest).amax(0)), old[0])
        # One that still covers all values stays, or every expert that learned nothing would be rounded anew.
        covers = (new <= old[0]) & (new * _MARGIN >= old[0])
        return scales._replace(common=torch.where(covers, old[0], new))

    @property
    def change_for_all(self) -> bool:
        """Whether experts that no adapter changes get another scale too."""
        return self.common is not None and self.old is not None and not torch.equal(self.common, self.old[0])

    def of_expert(self, w: Tensor) -> Tensor | None:
        if self.old is None or self.common is not None:
            return self.common
        return self.new(largest_values(w, self.old.shape[1]))

    def new(self, largest: Tensor) -> Tensor:
        assert self.old is not None
        if torch.equal(self.old[:, 0], self.old[:, -1]):  # gate and up have the same
            largest = largest.amax().expand_as(largest)
        return scale_for(self.scheme, largest)


def _settled(scale: Tensor, before: Tensor) -> Tensor:
    """`before` where the two float32 scales differ by roundings alone: then a sum of zero keeps every value."""
    return torch.where(torch.isclose(scale, before, rtol=_ROUNDINGS, atol=0.0), before, scale)


_MARGIN = 16.0  # by which a scale of all experts may be larger than it need be: the block scales and codes are floats

# Three roundings to float32: decoding the largest value, two, and dividing it, one.
_ROUNDINGS = 2.0**-22
