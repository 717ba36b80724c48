"""quantize_experts and dequantize_experts: between bf16 experts and RawWeights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.core.schemes import FLOATS, get_scheme
from torch_moe_ops.numerics import fp8, int4, int8, mx, nvfp4
from torch_moe_ops.weights.raw_weights import RawWeights


def quantize_experts(w13: Tensor, w2: Tensor, scheme: str = "nvfp4", **fields: Any) -> RawWeights:
    """Quantize experts online, by the weight form of each scheme (for nvfp4: bit-equal with ModelOpt).

    Args:
        w13: [num_experts, 2 * intermediate_size, hidden_size], rows [gate; up] (only up where the
            activation is not gated), bfloat16, float16 or float32.
        w2: [num_experts, hidden_size, intermediate_size].
        scheme: a weight scheme, "none" to keep the weights. Groups: int4 and int8 one scale per row,
            or 128 of K where K is a multiple; fp8 one scale per row. Exponents of MX blocks: rceil.
        fields: passed on to RawWeights (activation, biases, input scales, ...).

    Gate and up of an expert share one nvfp4 scale_2, as the exporting tools do for fused weights.
    Peak memory beyond the result is one expert in float32.

    Raises ValueError: shapes, dtypes or a scheme that do not fit; weights to quantize that are NaN or infinite
        (unless a compiler traces this, or a CUDA graph is captured: nothing waits for the device then).
    """
    sizes = get_scheme(scheme)
    for name, weight in (("w13", w13), ("w2", w2)):
        if weight.ndim != 3 or not weight.shape[0] or weight.dtype not in FLOATS:
            need = f"3 dimensions, at least one expert and a dtype of {[str(d) for d in FLOATS]}"
            got = f"{tuple(weight.shape)} {weight.dtype}"
            raise ValueError(f"quantize_experts: {name} must have {need}, got {got}")
        sizes.storage_k(weight.shape[2])
        if scheme != "none":
            _check_finite(name, weight)
    tensors: dict[str, Any] = {}
    for name, weight in (("w13", w13), ("w2", w2)):
        # The halves of w13 are tiled separately.
        halves = 2 if name == "w13" and w13.shape[1] == 2 * w2.shape[2] else 1
        for part, tensor in _quantize_matrix(scheme, weight, halves).items():
            tensors[f"{name}{part}"] = tensor
    if "w13_scale_2" in tensors:
        tensors["w13_scale_2"] = tensors["w13_scale_2"][:, None]
    return RawWeights(scheme=scheme, **tensors, **fields)


def _check_finite(name: str, weight: Tensor) -> None:
    """A group with an infinite weight would have an infinite scale, and be NaN as a whole once it is decoded."""
    if (
        weight.device.type == "meta"
        or isinstance(weight, torch._subclasses.FakeTensor)
        or torch.compiler.is_compiling()
    ):
        return
    if weight.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    bad = torch.stack([~of_expert.isfinite().all() for of_expert in weight])  # little memory, and one wait
    if bad.any():
        expert = int(bad.nonzero()[0])
        at = tuple((~weight[expert].isfinite()).nonzero()[0].tolist())
        got = f"{weight[expert][at].item()} in expert {expert} at {at}"
        raise ValueError(f"quantize_experts: {name} must be finite to be quantized, got {got}")


def quantized(raw: RawWeights, scheme: str) -> RawWeights:
    """Unquantized experts in another scheme; activation, biases and source stay. ValueError for quantized ones."""
    if raw.scheme != "none":
        raise ValueError(f"{raw.source}: experts must be unquantized to quantize them, got scheme {raw.scheme!r}")
    said = ("activation", "swiglu_alpha", "swiglu_beta", "swiglu_limit")
    kept = (*said, "w13_bias", "w2_bias", "source", "num_shared_experts")
    return quantize_experts(raw.w13, raw.w2, scheme, **{name: getattr(raw, name) for name in kept})


def _quantize_matrix(scheme: str, weight: Tensor, halves: int) -> dict[str, Tensor]:
    """All experts of one weight, one at a time into preallocated storage."""
    if scheme == "none":
        return {"": weight}
    out: dict[str, Tensor] = {}
    for e in range(weight.shape[0]):
        for part, tensor in QUANTIZERS[scheme](weight[e], halves).items():
            if part not in out:
                out[part] = tensor.new_empty((weight.shape[0], *tensor.shape))
            out[part][e] = tensor
    return out


Parts = dict[str, Tensor]


def _nvfp4(w: Tensor, halves: int) -> Parts:
    codes, scale, scale_2 = nvfp4.quantize_weight(w)
    return {"": codes, "_scale": scale, "_scale_2": scale_2}


def _mx(element: str) -> Callable[[Tensor, int], Parts]:
    def quantize(w: Tensor, halves: int) -> Parts:
        codes, scale = mx.quantize_mx(w, element)
        return {"": codes, "_scale": scale}

    return quantize


def _int4(group: int) -> Callable[[Tensor, int], Parts]:
    def quantize(w: Tensor, halves: int) -> Parts:
        size = group or (128 if w.shape[1] % 128 == 0 else -1)
        codes, scale, _ = int4.quantize_weight_group(w, size)
        return {"": int4.pack_int32(codes), "_scale": scale}

    return quantize


def _fp8(w: Tensor, halves: int) -> Parts:
    codes, scale = fp8.quantize_weight_channel(w)
    return {"": codes, "_scale": scale[:, None]}


def _fp8_block(w: Tensor, halves: int) -> Parts:
    pairs = [fp8.quantize_weight_block(half) for half in w.chunk(halves)]
    return {"": torch.cat([codes for codes, _ in pairs]), "_scale": torch.cat([scale for _, scale in pairs])}


def _int8(w: Tensor, halves: int) -> Parts:
    codes, scale = int8.quantize_weight_channel(w)
    return {"": codes, "_scale": scale[:, None]}


# scheme -> one expert's matrix [rows, K] and its halves -> the tensors of RawWeights by what follows the name.
QUANTIZERS: dict[str, Callable[[Tensor, int], Parts]] = {
    "nvfp4": _nvfp4,
    "mxfp4": _mx("e2m1"),
    "mxfp8": _mx("e4m3"),
    "mxfp6_e3m2": _mx("e3m2"),
    "mxfp6_e2m3": _mx("e2m3"),
    "mxint4": _int4(32),
    "int4": _int4(0),
    "fp8": _fp8,
    "fp8_block": _fp8_block,
    "int8": _int8,
}


def dequantize_experts(raw: RawWeights) -> tuple[Tensor, Tensor]:
    """What the checkpoint means: w13 float32 [num_experts, rows, hidden_size] and w2 float32.

    Rows of w13 are gate then up. Expert by expert into the result.
    """
    like: dict[str, Any] = {"dtype": torch.float32, "device": raw.device}
    w13 = torch.empty(raw.num_experts, raw.w13.shape[1], raw.hidden_size, **like)
    w2 = torch.empty(raw.num_experts, raw.hidden_size, raw.intermediate_size, **like)
    for e in range(raw.num_experts):
        w13[e] = dequantize_expert(raw, "w13", e)
        w2[e] = dequantize_expert(raw, "w2", e)
    return w13, w2


def dequantize_expert(raw: RawWeights, name: str, e: int) -> Tensor:
    """One expert's "w13" or "w2" in float32 [rows, K]."""
    # Which of them there are, RawWeights has checked.
    scale, zero_point, scale_2 = (_of_expert(getattr(raw, f"{name}_{part}"), e) for part in _PARTS)
    halves = 2 if name == "w13" and raw.is_gated else 1
    return dequantize_matrix(raw.scheme, getattr(raw, name)[e], scale, zero_point, scale_2, halves)


def dequantize_matrix(scheme: str, codes: Tensor, scale: Any, zero_point: Any, scale_2: Any, halves: int = 1) -> Tensor:
    """One matrix in float32 [rows, K].

    Args:
        codes: [rows, storage of K], as RawWeights holds one expert's; scale, zero_point, scale_2 likewise, None
            where the scheme or the checkpoint has none.
        halves: 2 where the rows are gate then up, each with a scale_2 or tiles of its own.
    """
    if scheme == "none":
        return codes.float()
    if scheme == "nvfp4":
        pieces = zip(codes.chunk(halves), scale.chunk(halves), scale_2.reshape(-1).expand(halves), strict=True)
        return torch.cat([nvfp4.dequantize(*piece) for piece in pieces])
    if element := get_scheme(scheme).element:
        return mx.dequantize_mx(codes, scale, element)
    if scheme in ("int4", "mxint4"):
        return int4.dequantize(int4.unpack_int32(codes), scale, zero_point)
    if scheme == "int8":
        return int8.dequantize_group(codes, scale, zero_point)
    if scheme in ("fp8", "fp8_block"):
        return _dequantize_fp8(scheme, codes, scale, halves)
    raise ValueError(f"dequantize_matrix: scheme must be one that was written here, got {scheme!r}")


_PARTS = ("scale", "zero_point", "scale_2")


def _of_expert(tensor: Tensor | None, e: int) -> Any:
    return None if tensor is None else tensor[e]


def _dequantize_fp8(scheme: str, codes: Tensor, scale: Tensor, halves: int) -> Tensor:
    if scheme == "fp8_block":
        pieces = zip(codes.chunk(halves), scale.chunk(halves), strict=True)
        return torch.cat([fp8.dequantize_block(*piece) for piece in pieces])
    rows = codes.shape[0]
    per_row = scale[:, 0] if scale.ndim == 2 else scale.repeat_interleave(rows // scale.shape[0])
    return fp8.dequantize(codes, per_row)
