"""INT4 weights beside fp8 activations: which calls fp8 tensor cores multiply (csrc/cuda/sm90/w4a8/w4a8_int4.cu).

They read the tiles that the other kernels read. Codes minus zero points are exact in e4m3, and scales multiply sums of
128 values of K in float32, so that no weight is rounded; sums of products have 13 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_moe_ops.backends.sm90 import layout
from torch_moe_ops.backends.sm90.common import check_device
from torch_moe_ops.core.call import ExpertsCall, for_kernels
from torch_moe_ops.core.kernel_facts import Sm90W4a8, own_of
from torch_moe_ops.core.problem import Problem

_own = own_of["experts_sm90_w4a8"]
# Slots that an expert has in the mean, from which on these kernels are the faster ones
# (benchmarks/results/hopper_notebook.md, section 10).
LEAST_SLOTS = 24


def run(call: ExpertsCall, out: Tensor) -> None:
    """Fill `out` [num_tokens, hidden_size] (bfloat16, float16 or float32, contiguous) from a checked call."""
    check_device(call)
    own = _own({"weights": "packed", "decode_tokens": 0})
    torch.ops.moeq_C.experts_sm90_w4a8(out, *for_kernels(call), *own)


def are_faster(call: ExpertsCall, slots: int | None = None) -> bool:
    """Whether they take a call's layer, and are the faster ones for as many tokens. slots: where it has no ids."""
    if call.scheme != "int4" or call.act_format != "fp8":
        return False
    slots = call.topk_ids.numel() if slots is None else slots
    return slots >= LEAST_SLOTS * call.all_experts() and takes(call)


def takes(call: ExpertsCall) -> bool:
    """Whether they have a kernel for an int4 layer: scales of 128 values of K and more, hidden sizes of whole tiles."""
    largest = layout.TILE * max(call.w2.shape[1:3])
    if call.hidden_states.shape[1] % layout.TILE:
        return False
    return largest <= Sm90W4a8.MAX_K and _has_kernel(call.w13_scale) and _has_kernel(call.w2_scale)


def _has_kernel(scales: Tensor | None) -> bool:
    """Of tiles of scales [E, row tiles, groups, tiles with the same ones, in a tile] (scales.py)."""
    if scales is None or scales.shape[4] > layout.TILE:  # groups of 32
        return False
    if scales.dtype == torch.int64 and scales.shape[4] == layout.TILE:  # float32
        return False
    return scales.shape[2] == 1 or scales.shape[3] % 2 == 0


def least_tokens(problem: Problem) -> int | None:
    """The fewest tokens that they run, for `explain`; None: never."""
    kinds = problem.weight_scales or ""
    if problem.scheme != "int4" or problem.act_format != "fp8" or problem.top_k is None:
        return None
    if max(problem.hidden_size, problem.intermediate_size) > Sm90W4a8.MAX_K or problem.hidden_size % layout.TILE:
        return None
    if "float32" in kinds or not all(" per 128" in kind or " per row" in kind for kind in kinds.split(", ")):
        return None
    return -(-LEAST_SLOTS * problem.num_experts // problem.top_k)
