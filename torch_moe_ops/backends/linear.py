"""The linear layout: tensors exactly as RawWeights holds them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from torch_moe_ops.core.layout import Layout, Sizes, Spec
from torch_moe_ops.core.schemes import Scheme
from torch_moe_ops.weights.raw_weights import RawWeights

ARGUMENTS = ("w13", "w13_scale", "w13_zero_point", "w2", "w2_scale", "w2_zero_point")


def specs(scheme: Scheme, sizes: Sizes) -> dict[str, Spec]:
    """w13 [E, rows, K storage], w2 [E, hidden_size, K storage], scales as `schemes.Scales` says."""
    experts, hidden, inter = sizes.num_experts, sizes.hidden_size, sizes.intermediate_size
    halves = 2 if sizes.is_gated else 1
    table: dict[str, Spec] = {}
    for name, n, k, parts in (("w13", halves * inter, hidden, halves), ("w2", hidden, inter, 1)):
        table[name] = (((experts, n, k // scheme.pack),), (sizes.weight_dtype,))
        if scheme.scales is not None:
            shapes = tuple((experts, *shape) for shape in scheme.scales.shapes(n, k, parts))
            table[f"{name}_scale"] = (shapes, scheme.scales.dtypes)
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
