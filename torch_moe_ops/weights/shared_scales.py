"""What shares a scale in a layer of raw weights: facts that decide which kernels take it."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_moe_ops.weights.raw_weights import RawWeights


def int4_scales(dtype: torch.dtype, k: int, groups: int, has_zero_points: bool) -> str:
    """What the scales of an int4 matrix are: "bfloat16 per 128", "float16 per row with zero points"."""
    points = " with zero points" if has_zero_points else ""
    return f"{str(dtype)[6:]} per {k // groups if groups > 1 else 'row'}{points}"


def int4_scales_of(raw: RawWeights) -> str:
    """`int4_scales` of an int4 layer; two kinds with ", "."""
    kinds = []
    for name, k in (("w13", raw.hidden_size), ("w2", raw.intermediate_size)):
        scale = getattr(raw, f"{name}_scale")
        kinds.append(int4_scales(scale.dtype, k, scale.shape[-1], getattr(raw, f"{name}_zero_point") is not None))
    return ", ".join(dict.fromkeys(kinds))


def weight_scales_of(scheme: str, *scales: Tensor | None, zero_points: tuple[Tensor | None, ...] = ()) -> str | None:
    """What shares a scale of fp8 weights: "tensor", "half" (of w13) or "channel"; of int8: "channel" or "group", "with
    zero points" where a matrix has some.

    None for other schemes.
    """
    if scheme == "int8":
        shares = "group" if any(s is not None and s.shape[-1] > 1 for s in scales) else "channel"
        return shares + (" with zero points" if any(points is not None for points in zero_points) else "")
    if scheme != "fp8":
        return None
    if any(s is None or s.ndim != 2 for s in scales):
        return "channel"
    return "tensor" if all(s is not None and s.shape[1] == 1 for s in scales) else "half"
