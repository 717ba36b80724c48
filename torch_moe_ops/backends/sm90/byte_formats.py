"""The schemes whose weights are e4m3 codes in tiles of 64 rows by 128 values of K (w4a8_layout.py).

fp8 and fp8_block keep their scales as the linear layout has them, for an intermediate size padded to whole tiles; those
of mxfp8 lie in tiles beside the codes. specs, prepare and restore are those of every backend with such weights.
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

SCHEMES = ("fp8", "fp8_block", "mxfp8")


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
        table[name] = ((tiled.codes_shape(sizes.num_experts, rows, k, tiled.FP8_BYTES),), (torch.uint8,))
        if scheme.name == "mxfp8":
            shape = tiled.codes_shape(sizes.num_experts, rows, k, tiled.MX_BYTES)
            table[f"{name}_scale"] = ((shape,), (torch.uint8,))
    scales, dtypes = table["w13_scale"]
    rows13 = matrices(sizes)[0][1]
    table["w13_scale"] = tuple((s[0], rows13, 1) if _is_per_row(scheme.name, s) else s for s in scales), dtypes
    return table


def prepare(raw: RawWeights) -> dict[str, Tensor]:
    """Tiles in the order of the tensor cores' operands, expert by expert, on raw's device; float32 scales are kept.

    Raises ValueError for weights that are NaN, and for exponents that the tiles do not hold.
    """
    tensors = {}
    for name, rows, _, gated in matrices(sizes_of(raw)):
        tensors[name] = tiled.tile_fp8(getattr(raw, name), rows, gated, name)
        scale = getattr(raw, f"{name}_scale")
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
    elif _is_per_row(scheme, tuple(scale.shape)):
        halves = 2 if gated else 1
        scale = scale.unflatten(1, (halves, -1))[:, :, : rows // halves].flatten(1, 2)
    return tiled.untile_fp8(codes, rows, k, gated), scale.contiguous()


def _is_per_row(scheme: str, shape: tuple[int, ...]) -> bool:
    return scheme == "fp8" and len(shape) == 3
