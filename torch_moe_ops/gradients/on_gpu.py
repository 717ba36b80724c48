"""The gradient of a routed layer (experts.py) where Triton's kernels run and activations are not rounded.

Nothing waits for the device, so that a step can be captured, and sizes of buffers come from shapes alone. Rows are not
gathered but read where they are. Weights are decoded a few experts at a time, w2 before w13, as they are exact in
bfloat16; what multiplies them is applied in float32 to what a product gives, by the one kernel between the products.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torch_moe_ops.backends.registry import Backend
from torch_moe_ops.backends.triton_engine.backward_pass import Pass
from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.core.layout import Sizes
from torch_moe_ops.core.schemes import ceil_div
from torch_moe_ops.gradients.pairs import sort_slots
from torch_moe_ops.gradients.weights import (
    CHUNK_ELEMENTS,
    Projection,
    decode_projection,
    dequantized,
    projection_of,
    projection_shape,
)

_TILES = 160  # of 128 x 256 results that a product should have in the mean: enough for every multiprocessor


class Found(NamedTuple):
    """Gradients as experts.py has them before it arranges them; None where not wanted. float32, but for hidden."""

    hidden: Tensor | None  # [num_tokens, hidden_size], of the dtype that was asked for
    weights: Tensor | None  # [num_tokens * top_k]; zero where an expert is not here
    w13_bias: Tensor | None  # [experts, rows]
    w2_bias: Tensor | None


def make_pass(
    call: ExpertsCall, sizes: Sizes, grad: Tensor, x: Tensor, biases: tuple[Tensor | None, Tensor | None]
) -> Pass:
    """x: what GEMM1 multiplied, biases in checkpoint order."""
    slots = sort_slots(call.topk_ids, call.local_expert_offset, sizes.num_experts)
    x, grad = (t.to(torch.bfloat16).contiguous() for t in (x, grad))
    # Without the rows that a layout adds, a bias is a view of it.
    w13_bias, w2_bias = (None if t is None else t.contiguous() for t in biases)
    return Pass(call, sizes, x, grad, (w13_bias, w2_bias), not call.router_weight_on_input, slots)


def run_pass(
    p: Pass, backend: Backend, hidden_dtype: torch.dtype | None, weights: bool, w13_bias: bool, w2_bias: bool
) -> Found:
    """hidden_dtype: None where that gradient is not wanted; as the others are where True."""
    from torch_moe_ops.backends.triton_engine import backward_launch as engine

    sizes, pairs = p.sizes, p.slots.order.shape[0]
    u = p.grad.new_empty((pairs, sizes.intermediate_size))
    for first, w2, factor in _chunks(p, backend, "w2", exact=True):
        engine.product(p.grad, p.slots.token, w2, p.slots.ends, first, False, u)
        factor2 = factor
    del w2  # a view of the workspace
    z = p.grad.new_empty((pairs, projection_shape("w13", sizes)[0]))
    dx = p.grad.new_empty((0 if hidden_dtype is None else pairs, sizes.hidden_size))
    dw = torch.zeros(pairs if weights else 0, device=z.device)
    for first, w13, factor in _chunks(p, backend, "w13", exact=not w13_bias):
        engine.product(p.x, p.slots.token, w13, p.slots.ends, first, True, z)
        engine.differentiate(p, z, u, dw, (factor, factor2), first, first + w13.shape[0])
        if hidden_dtype is not None:
            engine.product(z, None, w13, p.slots.ends, first, False, dx)
        factor13 = factor
    return Found(
        None if hidden_dtype is None else engine.combine(dx, p, hidden_dtype),
        dw if weights else None,
        # Rows of z are multiplied by the factor, here a power of two.
        engine.sums_of_experts(z, p, of_tokens=False) / factor13 if w13_bias else None,
        engine.sums_of_experts(p.grad, p, of_tokens=True) if w2_bias else None,
    )


def _chunks(p: Pass, backend: Backend, name: str, exact: bool) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(first expert, bfloat16 weights of it and following ones, float32 [E, 1 or halves] that multiplies all weights).

    One workspace for all. exact: alphas multiply them too; else they are part of the rounded weights.
    """
    projection, count = projection_of(p.call, name, backend, p.sizes), p.sizes.num_experts
    stored = projection.stored
    pairs, all_experts = p.slots.order.shape[0], p.call.all_experts()
    step = count if stored.weight.dtype == torch.bfloat16 else at_once_on_gpu(projection, pairs, all_experts)
    space = p.grad.new_empty((step if projection.may_have_kernel else 0, *projection.shape))
    factor = torch.ones((count, 1), device=p.grad.device)
    for first in range(0, count, step):
        experts = slice(first, min(first + step, count))
        weights = space[: experts.stop - first]
        found = dequantized(projection, experts, weights, exact)
        if found is None:
            weights = decode_projection(projection, experts, torch.bfloat16)
        elif first == 0:
            factor = factor * found
            if exact and stored.scale_2 is not None:
                factor = factor * stored.scale_2.reshape(count, -1)
        yield first, weights, factor


def at_once_on_gpu(projection: Projection, rows: int, all_experts: int) -> int:
    """How many experts' weights are decoded at once: what CHUNK_ELEMENTS hold, and enough to keep a GPU busy.

    rows: of all experts together, those of other ranks (all_experts) included.
    """
    n, k = projection.shape
    row_tiles = ceil_div(ceil_div(rows, all_experts), 128)
    busy = ceil_div(_TILES, row_tiles * ceil_div(min(n, k), 256))
    return min(projection.sizes.num_experts, max(1, CHUNK_ELEMENTS // (n * k), busy))
