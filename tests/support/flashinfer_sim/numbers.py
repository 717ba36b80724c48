"""Number formats, written for the tests alone: tables and float64 in place of the library's bit tricks."""

from __future__ import annotations

import torch
from torch import Tensor

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def nibbles(packed: Tensor) -> Tensor:
    """[..., K/2] bytes -> [..., K] codes, the low nibble first."""
    wide = packed.view(torch.uint8).long()
    return torch.stack([wide & 15, wide >> 4], -1).flatten(-2)


def e2m1(packed: Tensor) -> Tensor:
    return E2M1[nibbles(packed)]


def int4(packed: Tensor) -> Tensor:
    """Two's complement."""
    codes = nibbles(packed)
    return (codes - 16 * (codes >= 8)).double()


def e4m3(x: Tensor) -> Tensor:
    return x.view(torch.float8_e4m3fn).float().double()


def e8m0(x: Tensor) -> Tensor:
    return torch.exp2(x.view(torch.uint8).double() - 127)


def blocks(values: Tensor, scale: Tensor) -> Tensor:
    """values [..., K] times scale [..., K / block]."""
    return values * scale.repeat_interleave(values.shape[-1] // scale.shape[-1], -1)


def round_bf16(x: Tensor) -> Tensor:
    return x.float().bfloat16().double()


def round_e4m3(x: Tensor) -> Tensor:
    return x.float().clamp(-448, 448).to(torch.float8_e4m3fn).float().double()


def round_e2m1(x: Tensor) -> Tensor:
    """Nearest, ties to the even code, by distance to each of the eight magnitudes."""
    grid = E2M1[:8]
    distance = (x.abs()[..., None] - grid).abs()
    code = distance.argmin(-1)
    tie = distance.gather(-1, code[..., None]) == distance.gather(-1, (code + 1).clamp(max=7)[..., None])
    code = torch.where(tie[..., 0] & (code % 2 == 1) & (code < 7), code + 1, code)
    return grid[code] * torch.where(x < 0, -1.0, 1.0)


def through_nvfp4(x: Tensor, multiplier: Tensor) -> Tensor:
    """What is left of x [rows, K] after quantization with a multiplier [], still multiplied by it."""
    parts = x.float().unflatten(-1, (-1, 16))
    gs = multiplier.float()
    scale = (gs * (parts.abs().amax(-1) * torch.tensor(1 / 6))).clamp(max=448).to(torch.float8_e4m3fn).float()
    decode = scale * (1 / gs)
    factor = torch.where(scale == 0, torch.zeros_like(scale), 1 / decode)
    return (round_e2m1((parts * factor[..., None]).double()) * scale[..., None].double()).flatten(-2)


def through_nvfp4_rows(x: Tensor) -> Tensor:
    """Every row with a multiplier of its own, which brings its largest value to 448 * 6."""
    amax = x.float().abs().amax(-1)
    multipliers = torch.where(amax == 0, torch.ones_like(amax), 2688 / amax)
    rows = [through_nvfp4(row[None], m)[0] / m.double() for row, m in zip(x, multipliers, strict=True)]
    return torch.stack(rows)


def through_mxfp8(x: Tensor) -> Tensor:
    parts = x.unflatten(-1, (-1, 32))
    amax = parts.abs().amax(-1, keepdim=True)
    exponent = torch.where(amax > 0, torch.ceil(torch.log2(amax.clamp(min=1e-300) / 448)), torch.full_like(amax, -127))
    scale = torch.exp2(exponent.clamp(min=-127))
    return (round_e4m3(parts / scale) * scale).flatten(-2)


def through_fp8_groups(x: Tensor, group: int = 128) -> Tensor:
    parts = x.unflatten(-1, (-1, group)).float()
    amax = parts.abs().amax(-1, keepdim=True)
    scale = torch.where(amax == 0, torch.ones_like(amax), amax / 448)
    return (round_e4m3(parts / scale) * scale.double()).flatten(-2)
