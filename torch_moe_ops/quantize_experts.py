"""quantize_experts and dequantize_experts: between bf16 experts and RawWeights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torch_moe_ops.quant import nvfp4
from torch_moe_ops.raw_weights import RawWeights
from torch_moe_ops.schemes import FLOATS, get_scheme


def quantize_experts(
    w13: Tensor,
    w2: Tensor,
    scheme: str = "nvfp4",
    *,
    activation: str | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    a13_input_scale: Tensor | None = None,
    a2_input_scale: Tensor | None = None,
) -> RawWeights:
    """Quantize experts online, by the weight form of each scheme (for nvfp4: bit-equal with ModelOpt).

    Args:
        w13: [num_experts, 2 * intermediate_size, hidden_size], rows [gate; up] (only up where the
            activation is not gated), bfloat16, float16 or float32.
        w2: [num_experts, hidden_size, intermediate_size].
        scheme: a weight scheme, "none" to keep the weights.
        activation, w13_bias, w2_bias, a13_input_scale, a2_input_scale: passed on to RawWeights.

    Gate and up of an expert share one scale_2, as the exporting tools do for fused weights.
    Peak memory beyond the result is one expert in float32.
    """
    get_scheme(scheme)
    for name, weight in (("w13", w13), ("w2", w2)):
        if weight.ndim != 3 or weight.dtype not in FLOATS:
            raise ValueError(
                f"quantize_experts: {name} must have 3 dimensions and a dtype of {[str(d) for d in FLOATS]}, "
                f"got {tuple(weight.shape)} {weight.dtype}"
            )
    tensors = _QUANTIZERS[scheme](w13, w2)
    return RawWeights(
        scheme=scheme,
        **tensors,
        activation=activation,
        w13_bias=w13_bias,
        w2_bias=w2_bias,
        a13_input_scale=a13_input_scale,
        a2_input_scale=a2_input_scale,
    )


def dequantize_experts(raw: RawWeights) -> tuple[Tensor, Tensor]:
    """What the checkpoint means: w13 float32 [num_experts, rows, hidden_size] and w2 float32.

    Rows of w13 are gate then up. Expert by expert into the result.
    """
    halves = 2 if raw.is_gated else 1
    w13 = torch.empty(raw.num_experts, raw.w13.shape[1], raw.hidden_size, device=raw.device)
    w2 = torch.empty(raw.num_experts, raw.hidden_size, raw.intermediate_size, device=raw.device)
    for e in range(raw.num_experts):
        scale_2 = None if raw.w13_scale_2 is None else raw.w13_scale_2[e].expand(halves)
        pieces = _rows(raw.w13, raw.w13_scale, e, halves)
        for half, (codes, scale) in enumerate(pieces):
            target = w13[e].view(halves, -1, raw.hidden_size)[half]
            target.copy_(_DEQUANTIZERS[raw.scheme](codes, scale, None if scale_2 is None else scale_2[half]))
        codes, scale = _rows(raw.w2, raw.w2_scale, e, 1)[0]
        factor = None if raw.w2_scale_2 is None else raw.w2_scale_2[e]
        w2[e].copy_(_DEQUANTIZERS[raw.scheme](codes, scale, factor))
    return w13, w2


def _rows(weight: Tensor, scale: Tensor | None, e: int, halves: int) -> list[tuple[Tensor, Tensor | None]]:
    """Expert e, split into its halves of rows."""
    codes = weight[e].chunk(halves)
    scales = [None] * halves if scale is None else list(scale[e].chunk(halves))
    return list(zip(codes, scales, strict=True))


def _quantize_nvfp4(w13: Tensor, w2: Tensor) -> dict[str, Tensor]:
    experts = w13.shape[0]
    out: dict[str, Tensor] = {}
    for name, weight in (("w13", w13), ("w2", w2)):
        rows, k = weight.shape[1:]
        get_scheme("nvfp4").storage_k(k)
        codes = weight.new_empty((experts, rows, k // 2), dtype=torch.uint8)
        scale = weight.new_empty((experts, rows, k // 16), dtype=torch.float8_e4m3fn)
        scale_2 = weight.new_empty((experts,), dtype=torch.float32)
        for e in range(experts):
            codes[e], scale[e], scale_2[e] = nvfp4.quantize_weight(weight[e])
        out |= {name: codes, f"{name}_scale": scale, f"{name}_scale_2": scale_2}
    out["w13_scale_2"] = out["w13_scale_2"][:, None]
    return out


_QUANTIZERS: dict[str, Callable[[Tensor, Tensor], dict[str, Tensor]]] = {
    "none": lambda w13, w2: {"w13": w13, "w2": w2},
    "nvfp4": _quantize_nvfp4,
}

_DEQUANTIZERS: dict[str, Callable[[Tensor, Tensor | None, Tensor | None], Tensor]] = {
    "none": lambda weight, scale, scale_2: weight.float(),
    "nvfp4": nvfp4.dequantize,
}
