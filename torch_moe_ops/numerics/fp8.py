"""fp8: e4m3 codes with float32 scales per tensor, row (token or channel), 1x128 group or 128x128 tile.

scale = fl(amax / 448), 1.0 where that is 0; code = e4m3(clamp(fl(x / scale), +-448)); value = fl(code * scale).
NaN or an infinity under a dynamic scale makes the scale NaN and all of its codes NaN; with a calibrated scale its own
code.
Every scale multiplies to dequantize (`weight_scale_inv` of DeepSeek's files too, despite its name).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_moe_ops.numerics import e4m3
from torch_moe_ops.numerics._arithmetic import amax_or_nan, divide, require_dtype, require_floats
from torch_moe_ops.numerics._blocks import align_leading, per_row, require_shape

GROUP = 128


@torch.no_grad()
def quantize_fp8(x: Tensor, gscale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize activations, one scale per token, or with a calibrated scale.

    Args:
        x: [..., K] bfloat16, float16 or float32.
        gscale: None: dynamic, as the module says. float32 [] or x.shape[:-1]: multiplies x,
            code = e4m3(clamp(fl(x * gscale), +-448)), NaN where x is NaN or infinite.
    Returns: codes float8_e4m3fn [..., K], and scale float32, multiplies: x.shape[:-1], or fl(1 / gscale) in
        gscale's shape.
    """
    require_floats("fp8.quantize_fp8", "x", x)
    if gscale is None:
        return _quantize_rows("fp8.quantize_fp8", x)
    require_dtype("fp8.quantize_fp8", "gscale", gscale, torch.float32)
    x = x.float()
    scaled = (x * per_row("fp8.quantize_fp8", gscale, x)).masked_fill_(~x.isfinite(), torch.nan)
    return e4m3.encode(scaled), gscale.reciprocal()


@torch.no_grad()
def quantize_fp8_group(x: Tensor, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """Quantize activations, one scale per token and `group` of K; the last group may be partial.

    Returns: codes float8_e4m3fn [..., K], scale float32 [..., ceil(K / group)], multiplies.
    """
    require_floats("fp8.quantize_fp8_group", "x", x)
    _require_positive("fp8.quantize_fp8_group", "group", group)
    group = min(group, max(x.shape[-1], 1))  # a row is padded to whole groups
    codes, scale = quantize_weight_block(x[..., None, :], (1, group))
    return codes.squeeze(-2), scale.squeeze(-2)


@torch.no_grad()
def quantize_weight_tensor(w: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """w [..., N, K] -> codes float8_e4m3fn [..., N, K], scale float32 w.shape[:-2] (one per matrix), multiplies.

    scale: float32 of that shape, where one is given.
    """
    function = "fp8.quantize_weight_tensor"
    require_floats(function, "w", w)
    if w.ndim < 2:
        raise ValueError(f"{function}: w must have shape [..., N, K], got {tuple(w.shape)}")
    if scale is None:
        codes, scale = _quantize_rows(function, w.flatten(-2))
        return codes.unflatten(-1, w.shape[-2:]), scale
    require_dtype(function, "scale", scale, torch.float32)
    require_shape(function, "scale", scale, w.shape[:-2])
    return e4m3.encode(divide(w.float(), scale[..., None, None])), scale


@torch.no_grad()
def quantize_weight_channel(w: Tensor) -> tuple[Tensor, Tensor]:
    """w [..., N, K] -> codes float8_e4m3fn [..., N, K], scale float32 [..., N] (one per row), multiplies."""
    require_floats("fp8.quantize_weight_channel", "w", w)
    return _quantize_rows("fp8.quantize_weight_channel", w)


@torch.no_grad()
def quantize_weight_block(w: Tensor, block: tuple[int, int] = (GROUP, GROUP)) -> tuple[Tensor, Tensor]:
    """Quantize by tiles; tiles at the bottom and right edge may be partial.

    Args:
        w: [..., N, K] bfloat16, float16 or float32.
        block: (rows, columns) of a tile. Never inferred from shapes: with partial tiles that is ambiguous.
    Returns: codes float8_e4m3fn [..., N, K], scale float32 [..., ceil(N / rows), ceil(K / columns)], multiplies.
    """
    require_floats("fp8.quantize_weight_block", "w", w)
    if w.ndim < 2:
        raise ValueError(f"fp8.quantize_weight_block: w must have shape [..., N, K], got {tuple(w.shape)}")
    (rows, cols), (n, k) = _require_block("fp8.quantize_weight_block", block), w.shape[-2:]
    padded = pad(w, (0, -k % cols, 0, -n % rows))
    tiles = padded.unflatten(-1, (-1, cols)).unflatten(-3, (-1, rows))
    scale = _scale(amax_or_nan(tiles, (-3, -1)))
    return e4m3.encode(divide(w.float(), _expand(scale, w, (rows, cols)))), scale


def dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """fl(codes * scale): per tensor, channel or token.

    Args:
        codes: float8_e4m3fn [..., K].
        scale: float dtype, multiplies; its dimensions line up with the first ones of codes:
            [] or [E] (per tensor), [E, N] or [E, N, 1] (per channel), [M] (per token of [M, K]).
        dtype: float32 or float64.
    """
    require_dtype("fp8.dequantize", "codes", codes, torch.float8_e4m3fn)
    return codes.to(dtype) * align_leading("fp8.dequantize", "scale", scale, codes.ndim).to(dtype)


def dequantize_group(codes: Tensor, scale: Tensor, group: int = GROUP, dtype: torch.dtype = torch.float32) -> Tensor:
    """codes float8_e4m3fn [..., K] times scale [..., ceil(K / group)]."""
    _require_positive("fp8.dequantize_group", "group", group)
    require_shape("fp8.dequantize_group", "scale", scale, (*codes.shape[:-1], -(-codes.shape[-1] // group)))
    return dequantize_block(codes[..., None, :], scale[..., None, :], (1, group), dtype).squeeze(-2)


def dequantize_block(
    codes: Tensor, scale: Tensor, block: tuple[int, int] = (GROUP, GROUP), dtype: torch.dtype = torch.float32
) -> Tensor:
    """codes float8_e4m3fn [..., N, K] times scale [..., ceil(N / rows), ceil(K / columns)], tile by tile."""
    function = "fp8.dequantize_block"
    require_dtype(function, "codes", codes, torch.float8_e4m3fn)
    rows, cols = _require_block(function, block)
    n, k = codes.shape[-2:]
    require_shape(function, "scale", scale, (*codes.shape[:-2], -(-n // rows), -(-k // cols)))
    return codes.to(dtype) * _expand(scale.to(dtype), codes, (rows, cols))


def _quantize_rows(function: str, x: Tensor) -> tuple[Tensor, Tensor]:
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"{function}: K must be at least 1, got shape {tuple(x.shape)}")
    scale = _scale(amax_or_nan(x, -1))
    return e4m3.encode(divide(x.float(), scale[..., None])), scale


def _scale(amax: Tensor) -> Tensor:
    scale = divide(amax, e4m3.MAX)
    # Also where the division underflows: x / 0 would make infinities of values that are next to nothing.
    return scale.masked_fill_(scale == 0, 1.0)


def _expand(scale: Tensor, like: Tensor, block: tuple[int, int]) -> Tensor:
    """A scale per tile -> one per element of `like` [..., N, K]."""
    n, k = like.shape[-2:]
    return scale.repeat_interleave(block[0], -2)[..., :n, :].repeat_interleave(block[1], -1)[..., :k]


def _require_positive(function: str, name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{function}: {name} must be at least 1, got {value}")


def _require_block(function: str, block: tuple[int, int]) -> tuple[int, int]:
    for value in block:
        _require_positive(function, "block", value)
    return block
