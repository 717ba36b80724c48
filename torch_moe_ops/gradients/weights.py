"""A few experts' weights as numbers, from the layout that a backend made of them."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from torch_moe_ops.backends.registry import Backend
from torch_moe_ops.backends.triton_engine.backward_pass import Decoder
from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.core.layout import Sizes
from torch_moe_ops.core.schemes import SCHEMES
from torch_moe_ops.gradients.products import device_of
from torch_moe_ops.oracle.operands import Operand, Weight, decode_weight

MOST_EXPERTS = 1023  # that torch's grouped_mm takes
LEAST_ON_GPU = 8  # experts that are decoded at once: fewer would leave most of a GPU idle
CHUNK_ELEMENTS = 1 << 26  # weights that are decoded at once: 128 MiB in bfloat16


def experts_at_once(call: ExpertsCall, backend: Backend, sizes: Sizes, dtype: torch.dtype) -> int:
    """How many experts' weights are decoded at once: all where nothing is copied, else what CHUNK_ELEMENTS hold."""
    if call.scheme == "none" and backend.layout.name == "linear_v1" and call.w13.dtype == dtype:
        return min(sizes.num_experts, MOST_EXPERTS)
    halves = 2 if sizes.is_gated else 1
    of_expert = (halves + 1) * sizes.hidden_size * sizes.intermediate_size
    least = min(sizes.num_experts, LEAST_ON_GPU) if call.w13.is_cuda else 1
    return max(least, at_once(sizes.num_experts, of_expert))


def at_once(experts: int, of_expert: int) -> int:
    """How many of these experts, of so many weights each, are decoded at once."""
    return max(1, min(experts, MOST_EXPERTS, CHUNK_ELEMENTS // of_expert))


def decode_experts(
    call: ExpertsCall, backend: Backend, sizes: Sizes, experts: slice, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """w13 [n, rows, hidden_size], rows [gate; up], and w2 [n, hidden_size, intermediate_size] in `dtype`, real values.

    Args:
        call: a checked call; sizes: of its layer, the intermediate size as the layout pads it.
        experts: n consecutive local ones.
    """
    w13, w2 = (decode_projection(projection_of(call, name, backend, sizes), experts, dtype) for name in ("w13", "w2"))
    return w13, w2


class Stored(NamedTuple):
    """A projection of all experts as a layout has it. scale_2: float32 [E] or [E, halves], multiplies its values."""

    weight: Tensor
    scale: Tensor | None
    zero_point: Tensor | None
    scale_2: Tensor | None

    def of(self, experts: slice) -> Stored:
        """Of some experts."""
        return Stored._make(None if t is None else t[experts] for t in self)


class Projection(NamedTuple):
    """A layer's "w13" or "w2" (`name`) and what it takes to read it; sizes as decode_experts has them."""

    name: str
    stored: Stored
    scheme: str
    weight_policy: str
    backend: Backend
    sizes: Sizes

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and K of an expert's matrix."""
        return projection_shape(self.name, self.sizes)

    @property
    def halves(self) -> int:
        """How many blocks its rows are: [gate; up] are two."""
        return 2 if self.sizes.is_gated and self.name == "w13" else 1

    @property
    def may_have_kernel(self) -> bool:
        """Whether the backend's `dequantize` is worth asking. Weights that are no codes are taken as they lie."""
        return self.backend.dequantize is not None and self.weight_policy == "exact" and self.scheme != "none"


def projection_of(call: ExpertsCall, name: str, backend: Backend, sizes: Sizes) -> Projection:
    """The projection "w13" or "w2" of a checked call."""
    alphas, gscale = (call.g1_alphas, call.a1_gscale) if name == "w13" else (call.g2_alphas, call.a2_gscale)
    weight, scale, zero_point = (getattr(call, f"{name}{part}") for part in _PARTS)
    stored = Stored(weight, scale, zero_point, _real_alphas(call, alphas, gscale))
    return Projection(name, stored, call.scheme, call.weight_policy, backend, sizes)


def decode_projection(projection: Projection, experts: slice, dtype: torch.dtype) -> Tensor:
    """The projection of n consecutive experts: [n, rows, K] in `dtype`, real values."""
    name, _, scheme, weight_policy, backend, sizes = projection
    stored = projection.stored.of(experts)
    count = stored.weight.shape[0]
    if projection.may_have_kernel:
        fast = stored.weight.new_empty((count, *projection.shape), dtype=dtype)
        decoder = decoder_of(projection, fast, exact=False)
        if decoder is not None:
            with device_of(fast):
                decoder.run(experts.start, count, 0)
            return fast if decoder.factor == 1 else fast.mul_(decoder.factor)
        del fast
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    sizes = dataclasses.replace(sizes, num_experts=count)
    tensors = {f"{name}{part}": t for part, t in zip(_PARTS, stored, strict=False) if t is not None}
    if backend.decode is not None:
        operand = Operand(backend.decode(tensors, sizes)[name].flatten(0, 1).to(wide))
    else:
        raw = backend.restore(SCHEMES[scheme], tensors, sizes)
        # The rows of all experts make one tall matrix: only tiles are shared across rows, and `count` parts those.
        scale, zero_point = (t if (t := raw.get(f"{name}{part}")) is None else t.flatten(0, 1) for part in _PARTS[1:])
        plain = dtype if scheme == "none" else wide
        tall = Weight(raw[name].flatten(0, 1), scale, zero_point, count * projection.halves, plain)
        operand = decode_weight(scheme, tall, weight_policy)
    return _real(operand, stored.scale_2, count, dtype)


def decoder_of(projection: Projection, space: Tensor, exact: bool) -> Decoder | None:
    """What the backend decodes the projection with, as decode_projection, into `space` [step, rows, width]; or None.

    exact: without stored.scale_2, which multiplies what is decoded, too. Products of 4-bit, 6-bit and 8-bit floats with
        scales of e4m3 and e8m0 are exact in bfloat16 then; other numbers are rounded once.
    """
    dequantize = projection.backend.dequantize
    if dequantize is None or not projection.may_have_kernel:
        return None
    stored = projection.stored._replace(scale_2=None) if exact else projection.stored
    found: Decoder | None = dequantize(stored, projection.scheme, projection.halves, space)
    return found


def projection_shape(name: str, sizes: Sizes) -> tuple[int, int]:
    """Rows and K of an expert's projection."""
    if name == "w2":
        return sizes.hidden_size, sizes.intermediate_size
    return (2 if sizes.is_gated else 1) * sizes.intermediate_size, sizes.hidden_size


_PARTS = ("", "_scale", "_zero_point")


def _real_alphas(call: ExpertsCall, alphas: Tensor | None, gscale: Tensor | None) -> Tensor | None:
    """What multiplies the weights alone: [E], [E, halves] or None. NVFP4's alphas hold 1 / gscale as well."""
    if alphas is None or gscale is None or call.act_format != "nvfp4":
        return alphas
    return alphas * (gscale[:, None] if gscale.ndim and alphas.ndim == 2 else gscale)


def _real(operand: Operand, alphas: Tensor | None, experts: int, dtype: torch.dtype) -> Tensor:
    """values * factor * alpha, [experts, rows, K] in `dtype`."""
    values, factor = operand
    if alphas is not None:
        of_rows = alphas.reshape(-1).repeat_interleave(values.shape[0] // alphas.numel())[:, None]
        factor = of_rows if factor is None else factor * of_rows
    if factor is not None:
        values = values * factor.to(values.dtype)
    return values.to(dtype).unflatten(0, (experts, -1))
