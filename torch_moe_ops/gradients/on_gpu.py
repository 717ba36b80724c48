"""The gradient of a routed layer (experts.py) where Triton's kernels run and activations are not rounded.

Nothing waits for the device, so that a step can be captured, and sizes of buffers come from shapes alone. Rows are not
gathered but read where they are. Weights are decoded a few experts at a time, w2 before w13, as they are exact in
bfloat16; what multiplies them is applied in float32 to what a product sums. GEMM1's sums are differentiated where they
are, in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torch_moe_ops.backends.registry import Backend
from torch_moe_ops.backends.triton_engine.backward_pass import BySlot, Pass, Slots
from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.core.layout import Sizes
from torch_moe_ops.core.schemes import ceil_div
from torch_moe_ops.gradients.lora import NO_LORA, Lora
from torch_moe_ops.gradients.pairs import sort_slots
from torch_moe_ops.gradients.ranks_on_gpu import RanksOnGpu
from torch_moe_ops.gradients.weights import (
    CHUNK_ELEMENTS,
    Projection,
    decode_projection,
    dequantized,
    projection_of,
    projection_shape,
)

FEW_ROWS = 16  # of an expert in the mean: up to so many, weights are multiplied in Triton's kernels as they are packed
FEW_ROWS_BY_SLOT = 1 / 16  # the same where the layer's own kernels multiply them so, too
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
    slots = _sorted(call.topk_ids, call.local_expert_offset, sizes.num_experts)
    x, grad = (t.to(torch.bfloat16).contiguous() for t in (x, grad))
    # Without the rows that a layout adds, a bias is a view of it.
    w13_bias, w2_bias = (None if t is None else t.contiguous() for t in biases)
    return Pass(call, sizes, x, grad, (w13_bias, w2_bias), not call.router_weight_on_input, slots)


def _sorted(topk_ids: Tensor, local_expert_offset: int, num_experts: int) -> Slots:
    if topk_ids.is_cuda:
        from torch_moe_ops.backends.triton_engine.slots import MOST, sort_few_slots

        if topk_ids.numel() <= MOST:
            return sort_few_slots(topk_ids, local_expert_offset, num_experts)
    return sort_slots(topk_ids, local_expert_offset, num_experts)


def run_pass(
    p: Pass,
    backend: Backend,
    hidden_dtype: torch.dtype | None,
    weights: bool,
    w13_bias: bool,
    w2_bias: bool,
    lora: Lora = NO_LORA,
) -> Found:
    """hidden_dtype: None where that gradient is not wanted; as the others are where True.

    Adapters get their gradients on the way (Factors.found).
    """
    from torch_moe_ops.backends.triton_engine import backward_launch as engine

    sizes, pairs, token, ends = p.sizes, p.slots.order.shape[0], p.slots.token, p.slots.ends
    of13, of2 = (None if f is None else RanksOnGpu(f, p) for f in lora)
    z = p.grad.new_empty((pairs, projection_shape("w13", sizes)[0]))
    if of2 is None:  # the gradient of the intermediate lies where a tile's other result will be
        u = z[:, z.shape[1] - sizes.intermediate_size :]
    else:
        u = p.grad.new_empty((pairs, sizes.intermediate_size))
        of2.back(p.grad, token, 0, sizes.num_experts)
    addend = None if of2 is None else of2.backward_addend()
    for chunk in _chunks(p, backend, "w2"):
        engine.product(p.grad, token, chunk.weights, ends, chunk.first, False, u, chunk.factor, addend)
    del chunk  # a view of the workspace
    dx = p.grad.new_empty((0 if hidden_dtype is None else pairs, sizes.hidden_size))
    parts = engine.parts_of(p) if weights else None
    if of13 is not None:
        of13.down(p.x, token)
    addend = None if of13 is None else of13.forward_addend()
    back_addend = None if of13 is None else of13.backward_addend()
    one_factor = of13 is not None or w13_bias
    for chunk in _chunks(p, backend, "w13", one_factor):
        first, factor = chunk.first, chunk.factor
        engine.differentiate(p, chunk.weights, factor, first, u, addend, z, parts, keeps_h=of2 is not None)
        if of13 is not None:
            of13.back(z, None, first, first + chunk.weights.shape[0])
        if hidden_dtype is not None:
            scale = factor if factor.shape[1] == 1 else None  # two are in z
            engine.product(z, None, chunk.weights, ends, first, False, dx, scale, back_addend)
    del chunk
    if of13 is not None:
        of13.learn(p.x, True, z, False, None)
    if of2 is not None:  # where u was, the intermediate is
        of_slots = p.call.topk_weights.reshape(-1) if p.weighted else None
        of2.down(u, None)
        of2.learn(u, False, p.grad, True, of_slots)
    return Found(
        None if hidden_dtype is None else engine.combine(dx, p, hidden_dtype),
        None if parts is None else engine.weights_gradient(p, parts),
        engine.sums_of_experts(z, p, of_tokens=False) if w13_bias else None,
        engine.sums_of_experts(p.grad, p, of_tokens=True) if w2_bias else None,
    )


def run_forward(p: Pass, backend: Backend, lora: Lora, dtype: torch.dtype) -> Tensor:
    """[num_tokens, hidden_size] in `dtype`, of the layer with adapters. The gradient of the pass is not read."""
    from torch_moe_ops.backends.triton_engine import backward_launch as engine

    sizes, pairs, token, ends = p.sizes, p.slots.order.shape[0], p.slots.token, p.slots.ends
    of13, of2 = (None if f is None else RanksOnGpu(f, p) for f in lora)
    by_slot, all_experts = backend.rows_by_slot, p.call.all_experts()
    if backend.few_rows is not None and pairs <= FEW_ROWS_BY_SLOT * all_experts:
        by_slot = None
    layer = None if by_slot is None else by_slot(p)
    if layer is not None:
        return _forward_by_slot(p, layer, of13, of2, dtype)
    h = p.x.new_empty((pairs, sizes.intermediate_size))
    if of13 is not None:
        of13.down(p.x, token)
    addend = None if of13 is None else of13.forward_addend()
    if backend.few_rows is not None and pairs <= FEW_ROWS * all_experts:
        w13, w2 = (projection_of(p.call, name, backend, sizes) for name in ("w13", "w2"))
        if backend.few_rows(p, w13, p.x, token, addend, h):
            y = torch.empty((pairs, sizes.hidden_size), dtype=torch.float32, device=h.device)
            if of2 is not None:
                of2.down(h, None)
            addend = None if of2 is None else of2.forward_addend()
            backend.few_rows(p, w2, h, None, addend, y)
            return engine.combine(y, p, dtype, of_output=True)
    for chunk in _chunks(p, backend, "w13"):
        engine.hidden(p, chunk.weights, chunk.factor, chunk.first, h, addend)
    del chunk  # a view of the workspace
    y = p.x.new_empty((pairs, sizes.hidden_size))
    if of2 is not None:
        of2.down(h, None)
    addend = None if of2 is None else of2.forward_addend()
    for chunk in _chunks(p, backend, "w2"):
        engine.product(h, None, chunk.weights, ends, chunk.first, True, y, chunk.factor, addend)
    del chunk
    return engine.combine(y, p, dtype, of_output=True)


def _forward_by_slot(
    p: Pass, layer: BySlot, of13: RanksOnGpu | None, of2: RanksOnGpu | None, dtype: torch.dtype
) -> Tensor:
    """run_forward on the layer's own kernels (Backend.rows_by_slot), which multiply weights as they are packed.

    Of each expert's result, rounded to bfloat16, those have added up in float32 what weights and adapters give.
    """
    from torch_moe_ops.backends.triton_engine import backward_launch as engine

    slots = p.slots.order.shape[0]
    h = None if of2 is None else p.x.new_empty((slots, p.sizes.intermediate_size))
    layer.hidden(None if of13 is None else of13.by_slot(p.x, p.slots.token), h)
    addend = None if of2 is None or h is None else of2.by_slot(h, p.slots.order)
    del h
    rows = p.x.new_empty((slots, p.sizes.hidden_size))
    layer.output(addend, rows)
    return engine.combine(rows, p, dtype, of_output=True, by_slot=True)


class _Chunk(NamedTuple):
    """Weights of experts `first` and following as products take them, bfloat16, and what has to multiply them.

    factor: float32 [E, 1 or halves], of all experts.
    """

    first: int
    weights: Tensor
    factor: Tensor


def _chunks(p: Pass, backend: Backend, name: str, one_factor: bool = False) -> Iterator[_Chunk]:
    """The weights of all experts, a few at a time, in one workspace for all.

    Alphas are in the factor; where gate and up have their own and one_factor is wanted, in the rounded weights.
    """
    projection, count = projection_of(p.call, name, backend, p.sizes), p.sizes.num_experts
    stored = projection.stored
    pairs, all_experts = p.slots.order.shape[0], p.call.all_experts()
    step = count if stored.weight.dtype == torch.bfloat16 else at_once_on_gpu(projection, pairs, all_experts)
    space = p.x.new_empty((step if projection.may_have_kernel else 0, *projection.shape))
    exact = not one_factor or stored.scale_2 is None or stored.scale_2.numel() == count
    factor: Tensor | None = None
    for first in range(0, count, step):
        experts = slice(first, min(first + step, count))
        weights = space[: experts.stop - first]
        found = dequantized(projection, experts, weights, exact)
        if found is None:
            weights = decode_projection(projection, experts, torch.bfloat16)
        elif factor is None and exact and stored.scale_2 is not None:
            factor = found * stored.scale_2.reshape(count, -1)
        if factor is None:
            value = 1.0 if found is None else found
            factor = torch.full((count, 1), value, dtype=torch.float32, device=p.x.device)
        yield _Chunk(first, weights, factor)


def at_once_on_gpu(projection: Projection, rows: int, all_experts: int) -> int:
    """How many experts' weights are decoded at once: what CHUNK_ELEMENTS hold, and enough to keep a GPU busy.

    rows: of all experts together, those of other ranks (all_experts) included.
    """
    n, k = projection.shape
    row_tiles = ceil_div(ceil_div(rows, all_experts), 128)
    busy = ceil_div(_TILES, row_tiles * ceil_div(min(n, k), 256))
    return min(projection.sizes.num_experts, max(1, CHUNK_ELEMENTS // (n * k), busy))
