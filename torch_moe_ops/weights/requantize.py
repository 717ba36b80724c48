"""One expert's matrix quantized again: the tensors that a layer of raw weights has, in their shapes and dtypes."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_moe_ops.numerics import e4m3, fp8, int4, int8, nvfp4
from torch_moe_ops.numerics._arithmetic import divide
from torch_moe_ops.weights.quantize_experts import QUANTIZERS, Parts
from torch_moe_ops.weights.raw_weights import RawWeights


def matrix_scale(raw: RawWeights, name: str) -> Tensor | None:
    """The scales of whole matrices, [num_experts, 1] or of gate and up [num_experts, 2]: nvfp4's scale_2, fp8's.

    None where scales belong to rows or to parts of them.
    """
    scale, scale_2 = getattr(raw, f"{name}_scale"), getattr(raw, f"{name}_scale_2")
    if scale_2 is not None:
        return scale_2.reshape(raw.num_experts, -1)
    return scale if raw.scheme == "fp8" and scale.ndim == 2 else None


def largest_values(w: Tensor, halves: int) -> Tensor:
    """max |w| of each half of the rows of w, float32 [halves]."""
    return torch.stack([half.abs().amax() for half in w.chunk(halves)])


def scale_for(scheme: str, largest: Tensor) -> Tensor:
    """The `matrix_scale` of matrices whose largest values these are; 1 where that is 0."""
    scale = divide(largest, nvfp4.RANGE if scheme == "nvfp4" else e4m3.MAX)
    return scale.masked_fill_(scale == 0, 1.0)


def requantize(raw: RawWeights, name: str, w: Tensor, scale_of_matrix: Tensor | None) -> Parts:
    """Quantize one expert's matrix as `raw` has the others.

    Args:
        raw: says scheme, group sizes, dtypes of scales, and whether there are zero points.
        name: "w13" or "w2".
        w: float32 [rows, K].
        scale_of_matrix: float32 [1 or 2], the expert's `matrix_scale`; None where there is none.

    Returns: an expert's tensors by what follows the name: "", "_scale", "_scale_2", "_zero_point".
    """
    scheme = raw.scheme
    if scheme == "none":
        return {"": w.to(raw.w13.dtype)}
    if scale_of_matrix is not None:
        return _by_matrix(raw, name, w, scale_of_matrix)
    if scheme in ("int4", "mxint4", "int8"):
        return _integers(raw, name, w)
    return QUANTIZERS[scheme](w, 2 if name == "w13" and raw.is_gated else 1)


def _by_matrix(raw: RawWeights, name: str, w: Tensor, scales: Tensor) -> Parts:
    pieces = list(zip(w.chunk(scales.numel()), scales, strict=True))
    if raw.scheme == "fp8":
        return {"": torch.cat([fp8.quantize_weight_tensor(*piece)[0] for piece in pieces]), "_scale": scales}
    quantized = [nvfp4.quantize_weight(*piece) for piece in pieces]
    codes, block_scales = (torch.cat([parts[i] for parts in quantized]) for i in (0, 1))
    scale_2 = scales if name == "w13" else scales[0]
    return {"": codes, "_scale": block_scales, "_scale_2": scale_2}


def _integers(raw: RawWeights, name: str, w: Tensor) -> Parts:
    """Groups of K, or one group a row; with zero points where the projection has them."""
    scale, has_zero_points = getattr(raw, f"{name}_scale"), getattr(raw, f"{name}_zero_point") is not None
    group = w.shape[1] // scale.shape[2]
    zero_point: Tensor | None = None
    if raw.scheme != "int8":
        codes, new_scale, zero_point = int4.quantize_weight_group(w, group, not has_zero_points, scale.dtype)
        codes = int4.pack_int32(codes)
    elif has_zero_points:
        codes, new_scale, zero_point = int8.quantize_weight_asymmetric(w, group, scale.dtype)
    else:
        codes, new_scale = int8.quantize_weight_group(w, group, scale.dtype)
    return {"": codes, "_scale": new_scale} | ({} if zero_point is None else {"_zero_point": zero_point})
