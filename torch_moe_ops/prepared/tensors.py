"""The tensors and texts of prepared weights, from raw weights, a backend and settings."""

from __future__ import annotations

import dataclasses
import json
import urllib.parse
from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.backends.registry import Backend
from torch_moe_ops.core.schemes import SCHEMES
from torch_moe_ops.weights.raw_weights import RawWeights

KEPT = ("w13_scale_2", "w2_scale_2", "a13_input_scale", "a2_input_scale")
PLAIN_FIELDS = ("activation", "swiglu_alpha", "swiglu_beta", "swiglu_limit", "source")


def tensors_of(raw: RawWeights, backend: Backend, settings: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Every tensor of PreparedWeights, contiguous and on `device`. ValueError: a scale is NaN."""
    _check_scales(raw)
    tensors = {name: getattr(raw, name) for name in KEPT if getattr(raw, name) is not None}
    scaled = raw
    if backend.one_input_scale and raw.a13_input_scale is not None:
        scaled = dataclasses.replace(raw, a13_input_scale=raw.a13_input_scale.max())
    tensors |= _scalars(scaled, static=settings["act_format"] in SCHEMES[raw.scheme].static_acts)
    tensors |= backend.prepare(raw)
    padded = backend.layout.intermediate_size(SCHEMES[raw.scheme], tuple(tensors["w2"].shape))
    if raw.w13_bias is not None:
        halves = raw.w13_bias.float().unflatten(1, (-1, raw.intermediate_size))
        extra = padded - raw.intermediate_size
        tensors["w13_bias"] = torch.nn.functional.pad(halves, (0, extra)).flatten(1)
    if raw.w2_bias is not None:
        tensors["w2_bias"] = raw.w2_bias.float()
    if backend.bias_layout is not None:
        for name in tensors.keys() & {"w13_bias", "w2_bias"}:
            halves = 2 if name == "w13_bias" and raw.is_gated else 1
            tensors[name] = backend.bias_layout.arrange(name, tensors[name], halves)
    moved = {name: tensor.detach().to(device).contiguous() for name, tensor in tensors.items()}
    return own_memory(moved, raw.tensors())  # `update_` writes into it


def _check_scales(raw: RawWeights) -> None:
    """Scales hold no NaN: what a kernel makes of such a byte, which may be a number, depends on how it decodes."""
    for name in ("w13_scale", "w2_scale"):
        scale = getattr(raw, name)
        if scale is None or scale.device.type == "meta" or isinstance(scale, torch._subclasses.FakeTensor):
            continue
        bad = torch.stack([_is_nan(of_expert).any() for of_expert in scale])  # little memory, and one wait
        if bad.any():
            raise ValueError(f"{name} must hold no NaN, got one in expert {int(bad.nonzero()[0])}")


def _is_nan(scale: Tensor) -> Tensor:
    if scale.dtype == torch.float8_e4m3fn:
        return scale.view(torch.uint8).bitwise_and(0x7F) == 0x7F
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return scale.view(torch.uint8) == 0xFF
    return scale.isnan()


def own_memory(tensors: dict[str, Tensor], others: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, those copied that share a storage with one of `others`."""
    taken = {_storage(t) for t in others.values()}
    return {name: t.clone() if _storage(t) in taken else t for name, t in tensors.items()}


def _storage(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _scalars(raw: RawWeights, static: bool) -> dict[str, Tensor]:
    """Alphas and gscales.

    static: the activation format takes calibrated scales. Then gscale = fl(1 / input_scale), and
    alpha = fl(input_scale * scale_2) where the scheme has alphas; a kernel of a scheme that has none
    multiplies by fl(1 / gscale) itself.
    """
    tensors: dict[str, Tensor] = {}
    pairs = (
        ("1", raw.w13_scale_2, raw.a13_input_scale if static else None),
        ("2", raw.w2_scale_2, raw.a2_input_scale if static else None),
    )
    for gemm, scale_2, input_scale in pairs:
        if input_scale is not None:
            tensors[f"a{gemm}_gscale"] = input_scale.reciprocal()
        if scale_2 is None:
            continue
        alphas = scale_2.squeeze(1) if scale_2.ndim == 2 and scale_2.shape[1] == 1 else scale_2
        if input_scale is not None:
            alphas = (input_scale[:, None] if input_scale.ndim and alphas.ndim == 2 else input_scale) * alphas
        tensors[f"g{gemm}_alphas"] = alphas
    return tensors


def plain_values(raw: RawWeights) -> str:
    plain = {name: getattr(raw, name) for name in PLAIN_FIELDS}
    for name in ("w13_bias", "w2_bias"):
        bias = getattr(raw, name)
        plain[f"{name}_dtype"] = None if bias is None else str(bias.dtype).removeprefix("torch.")
    # Quoted: torch.export writes string inputs into source code without escaping them.
    return urllib.parse.quote(json.dumps(plain))
