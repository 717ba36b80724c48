"""Backend `cpu`: our C++ kernels (AVX-512, AVX2 or portable, chosen when the extension loads)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from torch_moe_ops import _ext
from torch_moe_ops.backends import _cpu_layout
from torch_moe_ops.backends.registry import (
    Backend,
    Layout,
    Problem,
    Sizes,
    Spec,
    available,
    formats,
    one_of,
    register,
)
from torch_moe_ops.ops.call import ExpertsCall
from torch_moe_ops.raw_weights import RawWeights
from torch_moe_ops.schemes import Scheme

FORMATS = {"nvfp4": ("nvfp4", "none"), "none": ("none",)}


def _specs(scheme: Scheme, sizes: Sizes) -> dict[str, Spec]:
    shapes = _cpu_layout.packed_shapes(
        scheme.name,
        sizes.num_experts,
        sizes.hidden_size,
        sizes.intermediate_size,
        sizes.is_gated,
        sizes.weight_dtype,
    )
    return {name: ((shape,), (dtype,)) for name, (shape, dtype) in shapes.items()}


def prepare(raw: RawWeights) -> dict[str, Tensor]:
    """Panels of 16 output rows, expert by expert."""
    tensors = {}
    for name, gated in (("w13", raw.is_gated), ("w2", False)):
        tensors[name] = _cpu_layout.pack_weight(raw.scheme, getattr(raw, name), gated)
        scale = getattr(raw, f"{name}_scale")
        if scale is not None:
            tensors[f"{name}_scale"] = _cpu_layout.pack_scale(raw.scheme, scale, gated)
    return tensors


def restore(scheme: Scheme, tensors: Mapping[str, Tensor], sizes: Sizes) -> dict[str, Tensor]:
    """Inverse of prepare, bit for bit."""
    hidden, inter = sizes.hidden_size, sizes.intermediate_size
    rows = 2 * inter if sizes.is_gated else inter
    restored = {}
    for name, gated, size_n, size_k in (("w13", sizes.is_gated, rows, hidden), ("w2", False, hidden, inter)):
        restored[name] = _cpu_layout.unpack_weight(scheme.name, tensors[name], size_n, size_k, gated)
        if scheme.scales is not None:
            scale, groups = tensors[f"{name}_scale"], size_k // scheme.scales.size
            restored[f"{name}_scale"] = _cpu_layout.unpack_scale(scheme.name, scale, size_n, groups, gated)
    return restored


def run(call: ExpertsCall, out: Tensor) -> None:
    torch.ops.moeq_C.experts(
        out,
        call.hidden_states,
        call.hidden_states_scale,
        call.topk_ids,
        call.topk_weights,
        call.w13,
        call.w13_scale,
        call.w13_zero_point,
        call.g1_alphas,
        call.w13_bias,
        call.w2,
        call.w2_scale,
        call.w2_zero_point,
        call.g2_alphas,
        call.w2_bias,
        call.a1_gscale,
        call.a2_gscale,
        call.scheme,
        call.act_format,
        call.activation,
        call.swiglu_alpha,
        call.swiglu_beta,
        call.swiglu_limit,
        call.local_expert_offset,
        call.router_weight_on_input,
    )


def _notes(problem: Problem) -> str:
    return f"{torch.ops.moeq_C.cpu_isa()} kernels" if _ext.has_cpu_extension() else ""


register(
    Backend(
        name="cpu",
        layout=Layout(
            name="cpu_panels_v1", specs=_specs, intermediate_size=lambda s, shape: _cpu_layout.intermediate_size_of(s.name, shape)
        ),
        requires=(
            one_of("device", "cpu"),
            available(lambda: _ext.cpu_extension_reason() or None),
            formats(FORMATS),
        ),
        prepare=prepare,
        restore=restore,
        run=run,
        notes=_notes,
    )
)
