"""Two kernels around the exchange, where torch's own operations would be a dozen launches.

place_kernel may be launched dependent, ordered_sum_kernel is launched normally (docs/design.md, section 11).
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_moe_ops.backends.triton_engine.dependent import wait_for_previous_kernel
from torch_moe_ops.backends.triton_engine.elements import narrow


@triton.jit
def place_kernel(
    ids_ptr,
    first_ptr,
    count_ptr,
    slots_ptr,
    load_ptr,
    places_ptr,
    pairs,
    experts,
    slots,
    rank,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """placing.place, BLOCK pairs of token and expert a program. ids [pairs] int32 or int64, places [pairs] int32."""
    wait_for_previous_kernel(PDL)
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < pairs
    given = tl.load(ids_ptr + pair, mask=inside, other=-1)
    known = inside & (given >= 0) & (given < experts)
    expert = tl.where(known, given, 0).to(tl.int32)
    first = tl.load(first_ptr + expert, mask=known, other=0)
    count = tl.load(count_ptr + expert, mask=known, other=1)
    turn = (pair // TOP_K + rank) % tl.maximum(count, 1)
    at = tl.minimum(tl.maximum(first + turn, 0), slots - 1)
    place = tl.load(slots_ptr + at, mask=known, other=0)
    tl.store(places_ptr + pair, tl.where(known, place, -1), mask=inside)
    tl.atomic_add(load_ptr + expert, tl.full((BLOCK,), 1, tl.int64), mask=known, sem="relaxed")


@triton.jit
def ordered_sum_kernel(
    parts_ptr,
    out_ptr,
    elements,
    part_stride,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PTX: tl.constexpr,
):
    """nccl.ordered_sum, BLOCK elements a program. parts: PARTS times `elements`, part_stride elements apart."""
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = n < elements
    total = tl.load(parts_ptr + n, mask=inside, other=0.0).to(tl.float32)
    stride = tl.cast(part_stride, tl.int64)  # (PARTS - 1) of them may be beyond 2^31
    # Unrolled, so that the loads of all parts are in flight together.
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts_ptr + part * stride + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, narrow(total, out_ptr.dtype.element_ty, USE_PTX), mask=inside)
