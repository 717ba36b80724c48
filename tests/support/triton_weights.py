"""Random weights of every scheme in the linear layout, with outputs of order one for inputs of order one."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.core.schemes import SCHEMES, ceil_div

Tensors = tuple[Tensor, Tensor | None, Tensor | None]  # codes, scale, zero point
_RMS = {"e2m1": 3.3, "e4m3": 1.0, "e3m2": 11.0, "e2m3": 3.4}  # of random codes


def _nvfp4(experts: int, n: int, k: int, g: torch.Generator) -> Tensors:
    """Random codes and scales with every kind of scale: zero, subnormal, the largest."""
    codes = torch.randint(0, 256, (experts, n, k // 2), generator=g, dtype=torch.uint8)
    scale = (torch.rand((experts, n, k // 16), generator=g) * 64).to(torch.float8_e4m3fn)
    flat = scale.view(torch.uint8).view(-1)
    special = torch.tensor([0, 1, 7, 8, 126], dtype=torch.uint8)
    flat[: 5 * (flat.numel() // 40) : 8][: special.numel()] = special[: flat[: 5 * (flat.numel() // 40) : 8].numel()]
    return codes, scale, None


def _mx(scheme: str, experts: int, n: int, k: int, g: torch.Generator) -> Tensors:
    element = SCHEMES[scheme].element
    if element == "e4m3":
        codes = torch.randn((experts, n, k), generator=g).to(torch.float8_e4m3fn)
    else:
        high, width = (256, k // 2) if element == "e2m1" else (64, k)
        codes = torch.randint(0, high, (experts, n, width), generator=g, dtype=torch.uint8)
    middle = 127 - round(math.log2(_RMS[element] * math.sqrt(k)))
    scale = torch.randint(middle - 3, middle + 2, (experts, n, k // 32), generator=g, dtype=torch.uint8)
    scale.view(-1)[::37] = 0
    scale.view(-1)[1::41] = 100
    return codes, scale, None


def _fp8(experts: int, n: int, k: int, g: torch.Generator, kind: str, halves: int) -> Tensors:
    codes = torch.randn((experts, n, k), generator=g).to(torch.float8_e4m3fn)
    codes.view(torch.uint8).view(-1)[::97] = 3  # subnormal
    shape = {"channel": (n, 1), "half": (halves,), "tensor": (1,)}[kind]
    return codes, (torch.rand((experts, *shape), generator=g) + 0.5) / math.sqrt(k), None


def _fp8_block(experts: int, n: int, k: int, g: torch.Generator, halves: int) -> Tensors:
    codes = torch.randn((experts, n, k), generator=g).to(torch.float8_e4m3fn)
    shape = (experts, halves * ceil_div(n // halves, 128), ceil_div(k, 128))
    return codes, (torch.rand(shape, generator=g) + 0.25) / math.sqrt(k), None


def _integers(
    scheme: str, experts: int, n: int, k: int, g: torch.Generator, group: int, zero: bool, scale_dtype: torch.dtype
) -> Tensors:
    columns = k // group if group > 0 and k % group == 0 else 1
    shape = (experts, n, columns)
    points = None
    if scheme == "int8":
        codes = torch.randint(-128, 128, (experts, n, k), generator=g, dtype=torch.int8)
        points = torch.randint(-100, 100, shape, generator=g, dtype=torch.int8) if zero else None
        size = 74.0
    else:
        codes = torch.randint(-(2**31), 2**31, (experts, n, k // 8), generator=g).to(torch.int32)
        points = torch.randint(0, 17, shape, generator=g, dtype=torch.uint8) if zero else None
        size = 4.6
    scale = (torch.rand(shape, generator=g) + 0.5) / (size * math.sqrt(k))
    return codes, scale.to(scale_dtype), points


def make_weight(
    scheme: str,
    experts: int,
    n: int,
    k: int,
    g: torch.Generator,
    halves: int = 1,
    *,
    dtype: torch.dtype = torch.bfloat16,
    group: int = 32,
    zero: bool = False,
    scale_dtype: torch.dtype = torch.bfloat16,
    scales: str = "channel",
) -> Tensors:
    """[experts, n, k]. group, zero, scale_dtype: of int4 and int8 (a group that does not divide k: one for a row);
    scales: "channel", "half" or "tensor" of fp8; dtype: of unquantized weights."""
    if scheme == "nvfp4":
        return _nvfp4(experts, n, k, g)
    if scheme.startswith("mxfp"):
        return _mx(scheme, experts, n, k, g)
    if scheme == "fp8":
        return _fp8(experts, n, k, g, scales, halves)
    if scheme == "fp8_block":
        return _fp8_block(experts, n, k, g, halves)
    if scheme in ("mxint4", "int4", "int8"):
        mx: dict[str, Any] = {"group": 32, "zero": False, "scale_dtype": torch.bfloat16}
        options = mx if scheme == "mxint4" else {"group": group, "zero": zero, "scale_dtype": scale_dtype}
        return _integers(scheme, experts, n, k, g, **options)
    return (torch.randn((experts, n, k), generator=g) * k**-0.5).to(dtype), None, None


def of_three_bits(scale: Tensor) -> Tensor:
    """Scales of three significant bits: int4 weights, rounded to bfloat16, stay as they are."""
    mantissa, exponent = scale.float().frexp()
    return torch.ldexp((mantissa * 8).round() / 8, exponent).to(scale.dtype)
