"""Last launch: out[t] = sum over j, ascending, of weight[t, j] * y[t, j], in float32."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from torch_moe_ops.kernels.triton.quantize import narrow


@triton.jit
def combine_kernel(
    y_ptr,
    ids_ptr,
    weights_ptr,
    out_ptr,
    top_k,
    num_experts,
    expert_offset,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHTED: tl.constexpr,
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (tokens, cdiv(H, BLOCK)). y: float32 [T * top_k, H]; slots of foreign experts are never read.

    WEIGHTED: False where the router weight went on the input.
    """
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for j in range(top_k):
        slot = token * top_k + j
        local = tl.load(ids_ptr + slot) - expert_offset
        if (local >= 0) & (local < num_experts):
            y = tl.load(y_ptr + slot * H + n, mask=n < H, other=0.0)
            if WEIGHTED:
                y = y * tl.load(weights_ptr + slot)
            acc += y
    tl.store(out_ptr + token * H + n, narrow(acc, out_ptr.dtype.element_ty, USE_PTX), mask=n < H)
