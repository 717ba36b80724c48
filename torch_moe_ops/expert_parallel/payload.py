"""What of a token is sent: its hidden states, or what the layer quantizes them to in any case."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torch_moe_ops.core.extension import has_cuda_extension
from torch_moe_ops.core.schemes import ACT_FORMATS, SCHEMES
from torch_moe_ops.prepared.fields import PreparedFields

PAYLOADS = ("auto", "plain", "quantized")
# Between four H200s layers with NVFP4 activations took 8 to 68 % longer with codes than with bfloat16 rows.
_SLOW_FROM_CODES = ("cuda_sm90",)
Quantizer = Callable[[Tensor], tuple[Tensor, Tensor]]


class Payload(NamedTuple):
    """quantize: hidden states -> codes and scales as the ops take them, None: sent as they are. reason: why so."""

    quantize: Quantizer | None
    reason: str

    @property
    def name(self) -> str:
        return "plain" if self.quantize is None else "quantized"


def payload_of(w: PreparedFields, requested: str) -> Payload:
    """How rows are sent. Either way the layer computes the same, bit for bit.

    Raises ValueError: "quantized" of a layer whose operands are not made from a row alone.
    """
    if requested not in PAYLOADS:
        raise ValueError(f"ExpertParallel: payload must be one of {list(PAYLOADS)}, got {requested!r}")
    if requested == "plain":
        return Payload(None, "as asked")
    quantizer, reason = _quantizer(w)
    if requested == "quantized" and quantizer is None:
        raise ValueError(
            f"ExpertParallel: payload must be 'auto' or 'plain' for this layer ({reason}), got {requested!r}"
        )
    one_launch = w.device.type == "cpu" or (w.act_format == "nvfp4" and has_cuda_extension())
    if quantizer is not None and requested == "auto" and not one_launch:
        text = f"quantizing to {w.act_format} takes several launches here; payload='quantized' asks for it"
        return Payload(None, text)
    if quantizer is not None and requested == "auto" and w.backend in _SLOW_FROM_CODES:
        text = f"{w.backend} loses more with codes than their exchange saves; payload='quantized' asks for it"
        return Payload(None, text)
    return Payload(quantizer, reason)


def _quantizer(w: PreparedFields) -> tuple[Quantizer | None, str]:
    act, gscale = w.act_format, w.a1_gscale
    said = f"the layer quantizes to {act}"
    if act == "none":
        return None, "the layer does not quantize hidden states"
    if w.router_weight_on_input:
        return None, "the router weight multiplies hidden states before they are quantized"
    if gscale is not None and gscale.ndim:
        return None, "every expert quantizes with an input scale of its own"
    if act == "nvfp4":
        if gscale is None:
            return None, "nvfp4 with a scale for each token, which packed hidden states cannot bring"
        return lambda x: torch.ops.moeq.quantize_nvfp4(x, gscale), said
    if act == "fp8":
        return lambda x: torch.ops.moeq.quantize_fp8(x, gscale, SCHEMES[w.scheme].fp8_group), said
    if act == "int8":
        return lambda x: torch.ops.moeq.quantize_int8(x, gscale), said
    if act in ("mxfp4", "mxfp8"):
        return getattr(torch.ops.moeq, f"quantize_{act}"), said
    return None, f"there is no op that quantizes to {act}"


def bytes_of_row(w: PreparedFields, payload: Payload, dtype: torch.dtype) -> int:
    """Bytes of one token's hidden states on the wire, scales included."""
    if payload.quantize is None:
        return w.hidden_size * dtype.itemsize
    act, scheme = ACT_FORMATS[w.act_format], SCHEMES[w.scheme]
    return w.hidden_size // act.pack + scheme.act_scale_columns(act, w.hidden_size) * act.scale_dtype.itemsize
