"""The linear layout: tensors exactly as RawWeights holds them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from torch_moe_ops.backends.registry import Layout, Sizes, Spec
from torch_moe_ops.raw_weights import RawWeights
from torch_moe_ops.schemes import Scheme

ARGUMENTS = ("w13", "w13_scale", "w13_zero_point", "w2", "w2_scale", "w2_zero_point")


def specs(scheme: Scheme, sizes: Sizes) -> dict[str, Spec]:
    """w13 [E, rows, K storage], w2 [E, hidden_size, K storage], block scales [.., K / block]."""
    experts, hidden, inter = sizes.num_experts, sizes.hidden_size, sizes.intermediate_size
    rows = 2 * inter if sizes.is_gated else inter
    table: dict[str, Spec] = {}
    for name, n, k in (("w13", rows, hidden), ("w2", hidden, inter)):
        table[name] = ((experts, n, k // scheme.pack), sizes.weight_dtype)
        if scheme.block:
            assert scheme.scale_dtype is not None
            table[f"{name}_scale"] = ((experts, n, k // scheme.block), scheme.scale_dtype)
    return table


LINEAR = Layout(
    name="linear_v1",
    specs=specs,
    intermediate_size=lambda scheme, w2_shape: scheme.logical_k(w2_shape[2]),
)


def prepare(raw: RawWeights) -> dict[str, Tensor]:
    """Nothing moves: the raw tensors, contiguous."""
    return {name: t.contiguous() for name in ARGUMENTS if (t := getattr(raw, name)) is not None}


def restore(scheme: Scheme, tensors: Mapping[str, Tensor], sizes: Sizes) -> dict[str, Tensor]:
    """Inverse of prepare."""
    return dict(tensors)
