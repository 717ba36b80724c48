"""grouped_linear: one projection of prepared experts, for those who compose a layer themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_moe_ops.core.activations import ACTIVATIONS
from torch_moe_ops.prepared.prepared_weights import PreparedWeights


def grouped_linear(x: Tensor, w: PreparedWeights, offsets: Tensor, *, projection: str | None = None) -> Tensor:
    """Rows sorted by expert, each times its expert's weights: `torch.ops.moeq.grouped_linear`. Differentiable in x.

    Weight-only, whatever `w.act_format` is: x is not quantized, no bias is added, no activation follows. Packed weights
    are decoded a few experts at a time, in the forward and in the backward pass, and nothing of them is kept.

    Args:
        x: [rows, hidden_size] for w13, [rows, intermediate_size] for w2; bfloat16, float16 or float32.
        w: made by `prepare`, for any backend.
        offsets: int32 (int64 is converted) [num_local_experts]: the row behind the last one of each expert, as
            `torch.cumsum` of the numbers of rows makes them. Rows behind the last offset give zeros.
        projection: "w13" or "w2". None: the one that x is as wide as; hidden_size and intermediate_size must differ.

    Returns: [rows, 2 * intermediate_size], [gate, up] ([rows, intermediate_size] where not gated), for w13;
        [rows, hidden_size] for w2; in the dtype of x.
    Raises: ValueError where no projection fits x; RuntimeError of the op.
    """
    name = _projection(x, w) if projection is None else projection
    parts = [getattr(w, f"{name}{part}", None) for part in ("", "_scale", "_zero_point", "_scale_2")]
    ends = offsets.clamp(-1, 2**31 - 1).to(torch.int32) if offsets.dtype == torch.int64 else offsets
    sizes = (w.hidden_size, w.intermediate_size, ACTIVATIONS[w.activation].is_gated)
    return torch.ops.moeq.grouped_linear(x, ends, *parts, w.backend, w.scheme, name, *sizes, False, w.weight_policy)


def _projection(x: Tensor, w: PreparedWeights) -> str:
    widths = {"w13": w.hidden_size, "w2": w.intermediate_size}
    found = [name for name, width in widths.items() if x.shape[-1] == width]
    if len(found) != 1:
        why = "be given, as hidden_size and intermediate_size are the same" if found else f"fit x (columns: {widths})"
        raise ValueError(f"grouped_linear: projection must {why}, got {x.shape[-1] if not found else None}")
    return found[0]
