"""The schemes whose weights are e4m3 or int8 codes in tiles of 64 rows by 128 values of K (w4a8_layout.py).

fp8 and fp8_block keep their scales as the linear layout has them, for an intermediate size padded to whole tiles; so
does int8, in float32, where rows have one and there are no zero points; those of mxfp8 lie in tiles beside the codes.
specs, prepare and restore are those of every backend with such weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from torch_moe_ops.backends import linear
from torch_moe_ops.backends.sm90 import w4a8_layout as tiled
from torch_moe_ops.core.layout import Sizes, Spec
from torch_moe_ops.core.schemes import Scheme
from torch_moe_ops.weights.raw_weights import RawWeights
from torch_moe_ops.weights.shared_scales import weight_scales_of

SCHEMES = ("fp8", "fp8_block", "mxfp8", "int8")
CODES = {scheme: torch.int8 if scheme == "int8" else torch.uint8 for scheme in SCHEMES}  # dtypes of tiles
# What the scales of int8 weights were, as float32 has them: by how many dimensions of one element follow their rows.
_INT8_SCALES = (torch.float32, torch.bfloat16, torch.float16)


def sizes_of(raw: RawWeights) -> Sizes:
    """Those of raw weights."""
    return Sizes(raw.num_experts, raw.hidden_size, raw.intermediate_size, raw.is_gated, raw.w13.dtype)


def matrices(sizes: Sizes) -> tuple[tuple[str, int, int, bool], ...]:
    """Name, padded rows, K and whether it has gate rows, of both weights."""
    hidden, inter, gated = sizes.hidden_size, sizes.intermediate_size, sizes.is_gated
    padded = tiled.TILE_K * tiled.tiles(inter, tiled.TILE_K)
    rows2 = tiled.padded_rows(hidden, False)
    return ("w13", (2 if gated else 1) * padded, hidden, gated), ("w2", rows2, inter, False)


def specs(scheme: Scheme, sizes: Sizes) -> dict[str, Spec]:
    """Shapes and dtypes of w13, w2 and their scales."""
    table = dict(linear.specs(scheme, sizes))
    for name, rows, k, _ in matrices(sizes):
        table[name] = ((tiled.codes_shape(sizes.num_experts, rows, k, tiled.FP8_BYTES),), (CODES[scheme.name],))
        if scheme.name == "mxfp8":
            shape = tiled.codes_shape(sizes.num_experts, rows, k, tiled.MX_BYTES)
            table[f"{name}_scale"] = ((shape,), (torch.uint8,))
        if scheme.name == "int8":
            padded = rows if name == "w13" else sizes.hidden_size
            shapes = tuple((sizes.num_experts, padded, *(1,) * ones) for ones, _ in enumerate(_INT8_SCALES, 1))
            table[f"{name}_scale"] = (shapes, (torch.float32,))
    scales, dtypes = table["w13_scale"]
    rows13 = matrices(sizes)[0][1]
    table["w13_scale"] = tuple((s[0], rows13, 1) if _is_per_row(scheme.name, s) else s for s in scales), dtypes
    return table


def prepare(raw: RawWeights) -> dict[str, Tensor]:
    """Tiles in the order of the tensor cores' operands, expert by expert, on raw's device. float32 scales are kept,
    those of int8 become so.

    Raises ValueError for weights that are NaN, for exponents that the tiles do not hold, and for int8 weights with zero
    points or scales of groups.
    """
    if raw.scheme == "int8" and (reason := int8_reason(int8_scales_of(raw))) is not None:
        raise ValueError(f"backend 'cuda_sm90': {reason}")
    tensors = {}
    for name, rows, _, gated in matrices(sizes_of(raw)):
        scale = getattr(raw, f"{name}_scale")
        if raw.scheme == "int8":
            tensors[name] = tiled.tile_int8(getattr(raw, name), rows, gated)
            tensors[f"{name}_scale"] = _int8_scales(scale, rows if name == "w13" else raw.hidden_size, gated)
            continue
        tensors[name] = tiled.tile_fp8(getattr(raw, name), rows, gated, name)
        if raw.scheme == "mxfp8":
            scale = tiled.tile_mx_scales(scale, rows, gated, f"{name}_scale")
        elif name == "w13" and _is_per_row(raw.scheme, tuple(scale.shape)):
            scale = torch.stack([tiled.pad_rows(of_expert, rows, gated) for of_expert in scale])
        tensors[f"{name}_scale"] = scale.contiguous()
    return tensors


def restore(scheme: Scheme, tensors: Mapping[str, Tensor], sizes: Sizes) -> dict[str, Tensor]:
    """Inverse of prepare, bit for bit."""
    halves = 2 if sizes.is_gated else 1
    restored = {}
    for name, _, k, gated in matrices(sizes):
        if name not in tensors:
            continue
        shape = (sizes.hidden_size if name == "w2" else halves * sizes.intermediate_size, k)
        of_name = untiled(scheme.name, tensors[name], tensors[f"{name}_scale"], shape, gated)
        restored[name], restored[f"{name}_scale"] = of_name
    return restored


def untiled(scheme: str, codes: Tensor, scale: Tensor, shape: tuple[int, int], gated: bool) -> tuple[Tensor, Tensor]:
    """Codes and scales of one weight of some experts in the linear layout; shape: rows and K, rows not padded."""
    rows, k = shape
    if scheme == "mxfp8":
        scale = tiled.untile_mx_scales(scale, rows, k, gated)
    elif scheme == "int8" or _is_per_row(scheme, tuple(scale.shape)):
        halves = 2 if gated else 1
        dtype = _INT8_SCALES[scale.ndim - 3]
        scale = scale.flatten(2).unflatten(1, (halves, -1))[:, :, : rows // halves].flatten(1, 2).to(dtype)
    own = torch.int8 if scheme == "int8" else torch.float8_e4m3fn
    return tiled.untile_bytes(codes, rows, k, gated).view(own), scale.contiguous()


def int8_reason(kinds: str) -> str | None:
    """Why the layout cannot hold int8 weights; kinds: as `weight_scales_of` says them."""
    if kinds == "channel":
        return None
    return f"int8 weights must have a scale for each row, and no zero points, got {kinds}"


def int8_scales_of(raw: RawWeights) -> str:
    """`weight_scales_of` an int8 layer."""
    points = (raw.w13_zero_point, raw.w2_zero_point)
    return weight_scales_of(raw.scheme, raw.w13_scale, raw.w2_scale, zero_points=points) or ""


def _int8_scales(scale: Tensor, rows: int, gated: bool) -> Tensor:
    """[E, N, 1] of any float dtype -> float32 [E, rows, 1 or more ones]: see _INT8_SCALES."""
    padded = torch.stack([tiled.pad_rows(of_expert.float(), rows, gated) for of_expert in scale])
    return padded.view(*padded.shape[:2], *(1,) * (1 + _INT8_SCALES.index(scale.dtype)))


def _is_per_row(scheme: str, shape: tuple[int, ...]) -> bool:
    return scheme == "fp8" and len(shape) == 3
