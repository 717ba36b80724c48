"""Inputs that stress NVFP4 activation quantization, and its algorithm in single torch operations.

`expected_quantization` follows the definition literally, one fp32 operation of torch per rounding, with torch's own
float8 conversion; it shares no code with the library.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

E2M1_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def expected_quantization(x: torch.Tensor, gscale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, K]; gscale [] or [rows], multiplies -> codes uint8 [rows, K/2], scale float8_e4m3fn [rows, K/16]."""
    blocks = x.float().unflatten(1, (-1, 16))
    gscale = gscale.expand(x.shape[0])[:, None]
    one_sixth = torch.tensor(0x3E2AAAAB, dtype=torch.int32, device=x.device).view(torch.float32)
    amax = blocks.abs().amax(-1)
    scaled = gscale * (amax * one_sixth)
    bounded = torch.where(scaled > 448, 448.0, scaled)
    scale = torch.where(amax < torch.inf, bounded, torch.nan).to(torch.float8_e4m3fn)
    value = scale.float()
    inverse = 1.0 / (value * (1.0 / gscale))
    factor = torch.where(value == 0, 0.0, torch.where(inverse == torch.inf, torch.finfo(torch.float32).max, inverse))
    y = blocks * factor[..., None]
    magnitude = y.abs()
    code = torch.signbit(y).to(torch.uint8) << 3
    for index, tie in enumerate(E2M1_TIES):
        code += (magnitude > tie) if index % 2 == 0 else (magnitude >= tie)
    code = torch.where(value.isnan()[..., None], 7, code)
    low, high = code.flatten(1).unflatten(1, (-1, 2)).unbind(-1)
    return low | (high << 4), scale


def _normal(rows: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _random(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    x = _normal(37, 528, dtype, 1)
    return x, 2688 / x.float().abs().amax()


def _per_row(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    spread = torch.logspace(-4, 4, 41)[:, None]
    x = (_normal(41, 272, torch.float32, 2) * spread).to(dtype)
    return x, 2688 / x.float().abs().amax(1)


def _code_ties() -> tuple[torch.Tensor, torch.Tensor]:
    """Block maximum 6 under gscale 1, so that S = 1 and r = 1: every tie, with its neighbours, of both signs."""
    ties = torch.tensor([*E2M1_TIES, 6.0])
    blocks = [torch.cat([sign * limit, -sign * limit]) for sign in (1, -1) for limit in _neighbours(ties)]
    x = torch.stack(blocks)
    x[:, 7] = 6.0
    return x, torch.tensor(1.0)


def _neighbours(values: torch.Tensor) -> list[torch.Tensor]:
    infinity = torch.full_like(values, float("inf"))
    return [values, torch.nextafter(values, infinity), torch.nextafter(values, -infinity)]


def _scale_ties() -> tuple[torch.Tensor, torch.Tensor]:
    """Block maxima whose scale lies on, just above and just below the middle between two e4m3 numbers."""
    grid = torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = torch.cat(_neighbours((grid[1:] + grid[:-1]) / 2))
    rows = torch.cat([torch.cat(_neighbours(middles * 6)), middles * 7])
    x = rows[:, None] * torch.linspace(-1, 1, 16)
    return x, torch.tensor(1.0)


def _tiny_blocks() -> tuple[torch.Tensor, torch.Tensor]:
    """Scales among e4m3's subnormals and below: S = 0 up to 2^-10, magnitudes beyond 6 where S is rounded down."""
    largest = torch.linspace(0.2, 9.0, 257)[:, None] * 6 * 2.0**-9
    x = largest * torch.linspace(1, -1, 32)
    return x, torch.tensor(1.0)


def _zeros_and_signs() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.zeros(6, 32, dtype=torch.bfloat16)
    x[1] = -0.0
    x[2, ::2] = -0.0
    x[3, 16:] = torch.tensor([1.0, -0.0] * 8)
    x[4] = torch.tensor([6.0, -0.2] * 16)  # -0.2 rounds to zero and keeps its sign
    return x, torch.tensor(2.5)


def _saturated() -> tuple[torch.Tensor, torch.Tensor]:
    """A calibrated gscale that the data exceeds: S = 448, codes saturate at 6."""
    x = _normal(16, 256, torch.bfloat16, 3) * 100
    return x, torch.tensor(2688 / 7.0)


def _not_finite() -> tuple[torch.Tensor, torch.Tensor]:
    """NaN of both signs and infinities, in blocks of their own and together."""
    nan, inf = float("nan"), float("inf")
    x = _normal(9, 64, torch.bfloat16, 4)
    x[2] = nan
    x[3, 20], x[4, 63], x[5, 0] = nan, inf, -inf
    x[6, 5:9] = torch.tensor([inf, nan, -inf, -nan], dtype=torch.bfloat16)
    return x, torch.tensor(700.0)


def _no_gscale() -> tuple[torch.Tensor, torch.Tensor]:
    """A row whose dynamic gscale is NaN, and one without."""
    x = _normal(2, 64, torch.bfloat16, 6)
    x[0, 16:32] = 0
    return x, torch.tensor([float("nan"), 3.0])


def _extreme_magnitudes() -> tuple[torch.Tensor, torch.Tensor]:
    exponents = torch.arange(-126, 128, dtype=torch.float32)[:, None]
    x = _normal(254, 48, torch.float32, 5).clamp(-1.9, 1.9) * torch.exp2(exponents)
    amax = x.abs().amax(1)
    return x, torch.where(amax < 1e-34, torch.tensor(1e30), 2688 / amax)


def _tiny_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows whose dynamic gscale is the largest there is: nothing overflows, and the smallest of them are lost."""
    x = torch.linspace(-1.0, 1.1, 8 * 64).view(8, 64) * torch.tensor(10.0) ** -torch.arange(32.0, 40.0)[:, None]
    x[2, 16:32] = 0
    x[3, 48:] = -0.0
    return x, (2688 / x.abs().amax(1)).clamp(max=2.0**118)


def _factors_that_overflow() -> tuple[torch.Tensor, torch.Tensor]:
    """A calibrated gscale for which 1 / (S / gscale) is beyond the largest float: zeros stay zeros."""
    x = torch.linspace(-1e-38, 1.1e-38, 4 * 64).view(4, 64) * 2.0 ** -torch.arange(4.0)[:, None]
    x[:, ::3] = 0
    return x, torch.tensor(1e38)


def _subnormal_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.arange(1, 16 * 16 + 1, dtype=torch.int32).view(torch.float32).view(16, 16)
    return x, torch.tensor(3e38)


CASES: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
    "random_bf16": lambda: _random(torch.bfloat16),
    "random_f16": lambda: _random(torch.float16),
    "random_f32": lambda: _random(torch.float32),
    "per_row_bf16": lambda: _per_row(torch.bfloat16),
    "per_row_f16": lambda: _per_row(torch.float16),
    "per_row_f32": lambda: _per_row(torch.float32),
    "code_ties": _code_ties,
    "scale_ties": _scale_ties,
    "tiny_blocks": _tiny_blocks,
    "zeros_and_signs": _zeros_and_signs,
    "saturated": _saturated,
    "not_finite": _not_finite,
    "no_gscale": _no_gscale,
    "factors_that_overflow": _factors_that_overflow,
    "extreme_magnitudes": _extreme_magnitudes,
    "tiny_rows": _tiny_rows,
    "subnormal_inputs": _subnormal_inputs,
}
