"""Random weights in every storage format that a quant config describes, decoded in float64 without the package."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import cpu_emulation as emulation
import torch
from torch import Tensor

import torch_moe_ops as moe

EXPERTS, HIDDEN, INTER = 3, 160, 128
FP8, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


@dataclasses.dataclass
class Given:
    """A config, the weights beside it, and what both mean."""

    config: Any
    w13: Tensor
    w2: Tensor
    layer: emulation.Layer
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def raw(self) -> moe.RawWeights:
        return moe.RawWeights.from_quant_config(self.w13, self.w2, self.config, **self.options)


@dataclasses.dataclass
class Pair:
    """w13 and w2 in one format: stored codes, scales, zero points, and values in float64."""

    codes: tuple[Tensor, Tensor]
    scales: tuple[Tensor, Tensor]
    values: tuple[Tensor, Tensor]
    zeros: tuple[Tensor, Tensor]

    def given(self, config: Any, options: dict[str, Any] | None = None, **layer: Any) -> Given:
        return Given(config, *self.codes, emulation.Layer(*self.values, **layer), options or {})

    def stored(self, change: Callable[[Tensor], Tensor]) -> Pair:
        return dataclasses.replace(self, codes=(change(self.codes[0]), change(self.codes[1])))


def pair(make: Callable[[int, int], tuple[Tensor, ...]]) -> Pair:
    """make: (rows, K) -> codes, scale, values (and zero points), the halves of w13 and w2 one by one."""
    first, second = make(2 * INTER, HIDDEN), make(HIDDEN, INTER)
    both = tuple(zip(first, second, strict=True))
    return Pair(both[0], both[1], both[2], both[3] if len(both) > 3 else both[1])


def scaled(values: Tensor, scale: Tensor, group: int) -> Tensor:
    return values.double() * scale.double().repeat_interleave(group, 2)


def positive(*shape: int) -> Tensor:
    return torch.rand(shape) + 0.5


def nvfp4(rows: int, k: int) -> tuple[Tensor, ...]:
    codes = torch.randint(256, (EXPERTS, rows, k // 2), dtype=torch.uint8)
    scale = positive(EXPERTS, rows, k // 16).to(FP8)
    return codes, scale, scaled(emulation.decode_e2m1(codes), scale.float(), 16)


def exponents(rows: int, k: int) -> tuple[Tensor, Tensor]:
    byte = torch.randint(120, 124, (EXPERTS, rows, k // 32), dtype=torch.uint8)
    return byte, torch.exp2(byte.double() - 127)


def mxfp4(rows: int, k: int) -> tuple[Tensor, ...]:
    codes, (byte, factor) = torch.randint(256, (EXPERTS, rows, k // 2), dtype=torch.uint8), exponents(rows, k)
    return codes, byte, scaled(emulation.decode_e2m1(codes), factor, 32)


def mxfp8(rows: int, k: int) -> tuple[Tensor, ...]:
    codes, (byte, factor) = torch.randn(EXPERTS, rows, k).to(FP8), exponents(rows, k)
    return codes, byte, scaled(codes.float(), factor, 32)


def mxfp6(element: str) -> Callable[[int, int], tuple[Tensor, ...]]:
    table = torch.tensor(emulation.MX_ELEMENTS[f"mxfp6_{element}"][1])

    def make(rows: int, k: int) -> tuple[Tensor, ...]:
        codes, (byte, factor) = torch.randint(64, (EXPERTS, rows, k), dtype=torch.uint8), exponents(rows, k)
        values = torch.where(codes >= 32, -table[(codes & 31).long()], table[(codes & 31).long()])
        return codes, byte, scaled(values / table.max() * 6, factor, 32) * (table.max() / 6)

    return make


def fp8(per: str) -> Callable[[int, int], tuple[Tensor, ...]]:
    """per: "tensor", "half", "channel" or "block"."""

    def make(rows: int, k: int) -> tuple[Tensor, ...]:
        codes = torch.randn(EXPERTS, rows, k).to(FP8)
        if per == "block":
            scale = positive(EXPERTS, -(-rows // 128), -(-k // 128)) / 8
            factor = scale.repeat_interleave(128, 1)[:, :rows].repeat_interleave(128, 2)[:, :, :k]
        else:
            count = {"half": rows // INTER if rows > HIDDEN else 1, "channel": rows}.get(per, 1)
            scale = positive(EXPERTS, count) / 8
            factor = scale.repeat_interleave(rows // count, 1)[:, :, None]
            scale = scale[:, 0] if count == 1 else scale
        return codes, scale, codes.double() * factor.double()

    return make


def integers(
    bits: int, group: int, zero: bool = False, scale_dtype: torch.dtype = torch.float32
) -> Callable[[int, int], tuple[Tensor, ...]]:
    """Codes and zero points 0 .. 2^bits - 1, one int32 each."""
    largest = 2**bits - 1

    def make(rows: int, k: int) -> tuple[Tensor, ...]:
        size = k if group == -1 else group
        codes = torch.randint(largest + 1, (EXPERTS, rows, k), dtype=torch.int32)
        scale = (positive(EXPERTS, rows, k // size) / (2 * largest)).to(scale_dtype)
        center = torch.full(scale.shape, (largest + 1) // 2, dtype=torch.int32)
        if zero:
            center = torch.randint(largest // 3, 2 * largest // 3, scale.shape, dtype=torch.int32)
        return codes, scale, scaled(codes - center.repeat_interleave(size, 2), scale.float(), size), center

    return make


def two_a_byte(codes: Tensor) -> Tensor:
    even, odd = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return (even | odd << 4).to(torch.uint8)


def in_words(codes: Tensor, bits: int = 4) -> Tensor:
    """int32, element 0 in the lowest bits."""
    shifted = codes.long().unflatten(-1, (-1, 32 // bits)) << torch.arange(0, 32, bits)
    return shifted.sum(-1).to(torch.int32)


def along_rows(pack: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda zeros: pack(zeros.transpose(1, 2)).transpose(1, 2).contiguous()


def biases() -> dict[str, Any]:
    return {"w1_bias": torch.randn(EXPERTS, 2 * INTER) / 4, "w2_bias": torch.randn(EXPERTS, HIDDEN) / 4}


def of_layer(given: dict[str, Any]) -> dict[str, Any]:
    return {"w13_bias": given["w1_bias"], "w2_bias": given["w2_bias"]}


def kernel_scalars(per_half: bool, per_expert: bool, experts: int = EXPERTS) -> dict[str, Any]:
    """What a kernel of the field is given: gscales, and alphas that contain the input scales."""
    shape = (experts,) if per_expert else ()
    a13, a2 = positive(*shape) * 4 / 2688, positive(*shape) * 9 / 2688
    s13 = positive(experts, 2) if per_half else positive(experts)
    g1 = (a13[:, None] if per_half and per_expert else a13) * s13 / 16
    return {"g1_alphas": g1, "g2_alphas": a2 * positive(experts) / 16, "a1_gscale": 1 / a13, "a2_gscale": 1 / a2}


def flat_swizzle(scale: Tensor) -> Tensor:
    """The 128x4 layout written out element by element of its definition."""
    experts, rows, cols = scale.shape
    tiles = -(-cols // 4)
    out = torch.zeros(experts, -(-rows // 128) * 128 * tiles * 4, dtype=torch.uint8)
    m, c = torch.arange(rows)[:, None], torch.arange(cols)[None]
    offset = ((m // 128 * tiles + c // 4) * 32 + m % 32) * 16 + m % 128 // 32 * 4 + c % 4
    out[:, offset] = scale.view(torch.uint8)
    return out.view(scale.dtype)
