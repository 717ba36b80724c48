"""The schemes that the layout "cuda_sm90" holds: shapes of their tensors, prepare, restore, and what does not fit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from torch_moe_ops.backends.sm90 import byte_formats, layout, scales
from torch_moe_ops.backends.sm90.w4a8_layout import TILE_K
from torch_moe_ops.core.kernel_facts import SM90_FORMATS, Sm90, TileScales
from torch_moe_ops.core.layout import Sizes, Spec
from torch_moe_ops.core.problem import Problem
from torch_moe_ops.core.schemes import Scheme
from torch_moe_ops.weights.raw_weights import RawWeights
from torch_moe_ops.weights.shared_scales import int4_scales_of

_PER32, _PER64 = SM90_FORMATS["int4_per32"], SM90_FORMATS["int4_per64"]
_ZERO, _ZERO_BF16 = SM90_FORMATS["int4_zero"], SM90_FORMATS["int4_zero_bf16"]
_ZERO_PER32, _FLOAT = SM90_FORMATS["int4_zero_per32"], SM90_FORMATS["int4_float"]
_CODES = {"nvfp4": layout.E2M1, "mxfp4": layout.E2M1, "mxint4": layout.INT4, "int4": layout.INT4}


def tile_k(scheme: str) -> int:
    """Values of K in a tile."""
    return TILE_K if scheme in byte_formats.SCHEMES else layout.TILE


def size_multiple(scheme: str) -> int:
    """What the hidden size has to be a multiple of."""
    return Sm90.BYTE_HIDDEN_MULTIPLE if scheme in byte_formats.SCHEMES else Sm90.HIDDEN_MULTIPLE


def specs(scheme: Scheme, sizes: Sizes) -> dict[str, Spec]:
    """Shapes and dtypes of w13, w2 and their scales, tile by tile."""
    if scheme.name in byte_formats.SCHEMES:
        return byte_formats.specs(scheme, sizes)
    table: dict[str, Spec] = {}
    for name, rows, k, gated in _matrices(sizes):
        outer = layout.tiled_shape(sizes.num_experts, rows, k, gated)
        table[name] = (((*outer, layout.CODE_BYTES),), (torch.uint8,))
        if scheme.name in ("nvfp4", "mxfp4"):
            table[f"{name}_scale"] = (((*outer, SM90_FORMATS[scheme.name].in_tile),), (torch.uint8,))
            continue
        shapes = scales.int4_shapes(sizes.num_experts, rows, k, gated, _PER32)
        dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
        if scheme.name == "int4":
            for kind in (_PER64, _ZERO_BF16):
                shapes += scales.int4_shapes(sizes.num_experts, rows, k, gated, kind)
            dtypes += (torch.int32, torch.int64)
        table[f"{name}_scale"] = (shapes, dtypes)
    return table


def prepare(raw: RawWeights) -> dict[str, Tensor]:
    """Tiles in the order of the tensor cores' operands, expert by expert, on raw's device.

    Raises ValueError for scales that the layout cannot hold (scales.py), naming them.
    """
    if raw.scheme in byte_formats.SCHEMES:
        return byte_formats.prepare(raw)
    if raw.scheme == "int4" and (reason := _int4_reason(int4_scales_of(raw))) is not None:
        raise ValueError(f"backend 'cuda_sm90_int4': {reason}")
    kind = _CODES[raw.scheme]
    tensors = {}
    for name, gated in (("w13", raw.is_gated), ("w2", False)):
        tensors[name] = layout.pack_codes(getattr(raw, name), gated, kind)
        tensors[f"{name}_scale"] = _pack_scales(raw, name, gated)
    return tensors


def _pack_scales(raw: RawWeights, name: str, gated: bool) -> Tensor:
    scale, argument = getattr(raw, f"{name}_scale"), f"{name}_scale"
    if raw.scheme == "nvfp4":
        return scales.pack_nvfp4(scale, gated, argument)
    if raw.scheme == "mxfp4":
        return scales.pack_mxfp4(scale, gated, argument)
    k = raw.hidden_size if name == "w13" else raw.intermediate_size
    return scales.pack_int4(scale, getattr(raw, f"{name}_zero_point"), k, gated, argument, _int4_kind(raw))


def _int4_kind(raw: RawWeights) -> TileScales:
    """The form of the scales of both weights: the least that holds the dtypes and zero points of either."""
    kinds = "bfloat16 per 32" if raw.scheme == "mxint4" else int4_scales_of(raw)
    if " per 32" in kinds:
        return _PER32 if kinds == "bfloat16 per 32" else _ZERO_PER32
    if "float32" in kinds:
        return _FLOAT
    if any(kind.startswith("float16") for kind in kinds.split(", ")):
        return _ZERO
    return _PER64 if raw.w13_zero_point is None and raw.w2_zero_point is None else _ZERO_BF16


def restore(scheme: Scheme, tensors: Mapping[str, Tensor], sizes: Sizes) -> dict[str, Tensor]:
    """Inverse of prepare, bit for bit."""
    if scheme.name in byte_formats.SCHEMES:
        return byte_formats.restore(scheme, tensors, sizes)
    restored = {}
    for name, rows, k, gated in _matrices(sizes):
        if name not in tensors:
            continue
        restored[name] = layout.unpack_codes(tensors[name], rows, k, gated, _CODES[scheme.name])
        packed = tensors[f"{name}_scale"]
        if scheme.name == "nvfp4":
            scale, zero_points = scales.unpack_nvfp4(packed, rows, k, gated), None
        elif scheme.name == "mxfp4":
            scale, zero_points = scales.unpack_mxfp4(packed, rows, k, gated), None
        else:
            scale, zero_points = scales.unpack_int4(packed, rows, k, gated)
        restored[f"{name}_scale"] = scale
        if zero_points is not None:
            restored[f"{name}_zero_point"] = zero_points
    return restored


def exact_kernels(kinds: str) -> tuple[str, ...]:
    """Kernels that scale sums instead of int4 weights, and round none. kinds: of scales, as Problem has them."""
    if " per 32" in kinds:
        return ()
    if any(kind.startswith(("float16", "float32")) for kind in kinds.split(", ")):
        return ("decode", "slim")
    return ("decode",) if "zero points" in kinds else ()


def scales_reason(problem: Problem) -> str | None:
    """Why the layout cannot hold the scales of int4 and int8 weights."""
    if problem.weight_scales is None:
        return None
    if problem.scheme == "int8":
        return byte_formats.int8_reason(problem.weight_scales)
    return _int4_reason(problem.weight_scales) if problem.scheme == "int4" else None


def _int4_reason(kinds: str) -> str | None:
    each = kinds.split(", ")
    if not any(" per 32" in kind for kind in each):
        return None
    if all(" per 32" in kind and "float32" not in kind for kind in each):
        return None
    need = "be bfloat16 or float16 per 32 of K, both weights', or bfloat16, float16 or float32 per 64, 128 or row"
    return f"scales of int4 weights must {need}, got {kinds}"


def _matrices(sizes: Sizes) -> tuple[tuple[str, int, int, bool], ...]:
    """Name, rows in all, K, and whether half of the rows are gate rows."""
    hidden, inter, gated = sizes.hidden_size, sizes.intermediate_size, sizes.is_gated
    return ("w13", (2 if gated else 1) * inter, hidden, gated), ("w2", hidden, inter, False)
