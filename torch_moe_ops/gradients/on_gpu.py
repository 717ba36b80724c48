"""The gradient of a routed layer (experts.py) where Triton's kernels run and activations are not rounded.

Nothing waits for the device, so that a step can be captured, and sizes of buffers come from shapes alone. Rows are not
gathered but read where they are. Weights are decoded a few experts at a time, w2 before w13, as they are exact in
bfloat16; what multiplies them is applied in float32 to what a product sums. GEMM1's sums are differentiated where they
are, in float32. Where the gradients of hidden states, before they are added up, would be much beside the packed
weights, they are made a few columns at a time, and those columns of w13 are decoded once more (chunks.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from torch_moe_ops.backends.registry import Backend
from torch_moe_ops.backends.triton_engine.backward_pass import BySlot, Pass, Slots
from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.core.layout import Sizes
from torch_moe_ops.gradients.chunks import Decoding, Packed, windows_of_hidden
from torch_moe_ops.gradients.lora import NO_LORA, Lora
from torch_moe_ops.gradients.pairs import sort_slots
from torch_moe_ops.gradients.products import operand
from torch_moe_ops.gradients.ranks_on_gpu import RanksOnGpu
from torch_moe_ops.gradients.weights import projection_of, projection_shape

if TYPE_CHECKING:
    from torch_moe_ops.backends.triton_engine.grouped import Addend

FEW_ROWS = 16  # of an expert in the mean: up to so many, weights are multiplied in Triton's kernels as they are packed
FEW_ROWS_BY_SLOT = 1 / 16  # the same where the layer's own kernels multiply them so, too


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
    x, grad = operand(x), operand(grad)
    # Without the rows that a layout adds, a bias is a view of it.
    w13_bias, w2_bias = (None if t is None else t.contiguous() for t in biases)
    return Pass(call, sizes, x, grad, (w13_bias, w2_bias), not call.router_weight_on_input, slots)


def _sorted(topk_ids: Tensor, local_expert_offset: int, num_experts: int) -> Slots:
    if topk_ids.is_cuda:
        from torch_moe_ops.backends.triton_engine.slots import MOST, sort_slots_on_gpu

        if topk_ids.numel() <= MOST:
            return sort_slots_on_gpu(topk_ids, local_expert_offset, num_experts)
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
    w13, w2 = (projection_of(p.call, name, backend, sizes) for name in ("w13", "w2"))
    windows = [] if hidden_dtype is None else windows_of_hidden(p, w13)
    # What the gradients of hidden states will take, no other buffer does before.
    room = pairs * (windows[0].stop if windows else 0) + p.x.numel()
    _multiply(Packed(p, w2), p.grad, token, False, u, addend, room)
    parts = engine.parts_of(p, u) if weights else None
    if of13 is not None:
        of13.down(p.x, token)
    addend = None if of13 is None else of13.forward_addend()
    packed = Packed(p, w13, one_factor=of13 is not None or w13_bias)
    rows = p.grad.new_empty((pairs, sizes.hidden_size)) if len(windows) == 1 else None
    decoding = Decoding(packed, room=room if rows is None else 0)
    hidden_of = engine.Hidden(p, decoding.factor, u, addend, z, parts, keeps_h=of2 is not None)
    product: engine.Product | None = None
    if rows is not None:
        back_addend = None if of13 is None else of13.backward_addend()
        product = engine.Product(z, None, ends, False, rows, _one(decoding.factor), back_addend)
    for given in decoding.chunks():
        hidden_of(*given)
        if product is not None:
            if of13 is not None:
                _, first, experts = given
                of13.back(z, None, first, first + experts)
            product(*given)
    del given, decoding, hidden_of, product  # which hold the workspace
    if of13 is not None and rows is None:
        of13.back_and_learn(z)
    hidden: Tensor | None = None
    if rows is not None:
        assert hidden_dtype is not None
        if of2 is None:
            del u  # a view of z
        if of13 is None and not w13_bias:
            del z
        hidden = engine.combine(rows, p, hidden_dtype)
        del rows
    elif hidden_dtype is not None:
        hidden = p.grad.new_empty((p.call.topk_ids.shape[0], sizes.hidden_size), dtype=hidden_dtype)
        _hidden_in_windows(packed, z, windows, of13, hidden)
    if of13 is not None:
        of13.learn(p.x, True, z, False, None)
    if of2 is not None:  # where u was, the intermediate is
        of_slots = p.call.topk_weights.reshape(-1) if p.weighted else None
        of2.down_and_learn(u, of_slots)
        of2.learn(u, False, p.grad, True, of_slots)
    return Found(
        hidden,
        None if parts is None else engine.weights_gradient(p, parts),
        engine.sums_of_experts(z, p, of_tokens=False) if w13_bias else None,
        engine.sums_of_experts(p.grad, p, of_tokens=True) if w2_bias else None,
    )


def _multiply(
    packed: Packed, rows: Tensor, index: Tensor | None, transposed: bool, out: Tensor, addend: Addend | None,
    room: int = 0,
) -> None:  # fmt: skip
    """The product of rows (Product) with all experts' weights in `out`. room: as Decoding has it."""
    from torch_moe_ops.backends.triton_engine import backward_launch as engine

    decoding = Decoding(packed, room=room)
    product = engine.Product(rows, index, packed.p.slots.ends, transposed, out, decoding.factor, addend)
    for given in decoding.chunks():
        product(*given)


def _one(factor: Tensor) -> Tensor | None:
    """The factor that is left for the product with z, into which the two of gate and up went."""
    return factor if factor.shape[1] == 1 else None


def _hidden_in_windows(packed: Packed, z: Tensor, windows: list[slice], of13: RanksOnGpu | None, out: Tensor) -> None:
    """The gradient of hidden states in `out`, some columns at a time."""
    from torch_moe_ops.backends.triton_engine import backward_launch as engine

    p, pairs = packed.p, z.shape[0]
    space = z.new_empty(pairs * max(columns.stop - columns.start for columns in windows))
    decoding: Decoding | None = None
    product: engine.Product | None = None
    given: tuple[Tensor, int, int] | None = None
    for columns in windows:
        width = columns.stop - columns.start
        if decoding is None or decoding.width != width:
            decoding = product = given = None  # which hold a workspace, before there is another
            decoding = Decoding(packed, width)
            rows = space[: pairs * width].view(pairs, width)
        if product is None or of13 is not None:
            addend = None if of13 is None else of13.backward_addend(columns)
            product = engine.Product(z, None, p.slots.ends, False, rows, _one(decoding.factor), addend)
        for given in decoding.chunks(columns.start):
            product(*given)
        engine.combine_in(out[:, columns], rows, p)


def run_forward(p: Pass, backend: Backend, lora: Lora, dtype: torch.dtype) -> Tensor:
    """[num_tokens, hidden_size] in `dtype`, of the layer with adapters. The gradient of the pass is not read."""
    from torch_moe_ops.backends.triton_engine import backward_launch as engine

    sizes, pairs, token = p.sizes, p.slots.order.shape[0], p.slots.token
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
    w13, w2 = (projection_of(p.call, name, backend, sizes) for name in ("w13", "w2"))
    few_rows = backend.few_rows if pairs <= FEW_ROWS * all_experts else None
    if few_rows is not None and few_rows(p, w13, p.x, token, addend, h):
        y = torch.empty((pairs, sizes.hidden_size), dtype=torch.float32, device=h.device)
        if of2 is not None:
            of2.down(h, None)
        few_rows(p, w2, h, None, None if of2 is None else of2.forward_addend(), y)
        return engine.combine(y, p, dtype, of_output=True)
    decoding = Decoding(Packed(p, w13))
    hidden_of = engine.Hidden(p, decoding.factor, h, addend)
    for given in decoding.chunks():
        hidden_of(*given)
    del given, decoding, hidden_of  # which hold the workspace
    y = p.x.new_empty((pairs, sizes.hidden_size))
    if of2 is not None:
        of2.down(h, None)
    addend = None if of2 is None else of2.forward_addend()
    _multiply(Packed(p, w2), h, None, True, y, addend)
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
