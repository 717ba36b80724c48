"""The `cuda_sm90_bf16` backend: unquantized bfloat16 weights on Hopper, in csrc/cuda/sm90/bf16 (docs/hopper.md).

Weights stay in the linear layout. Many tokens are multiplied by this backend's own kernels, few by those of `triton`,
which read the same tensors and are as fast as memory there; so is a layer on float16 hidden states.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from torch_moe_ops.backends import linear
from torch_moe_ops.backends.registry import Backend, Requirement, available, formats, register
from torch_moe_ops.backends.sm90.common import NEEDS, check_device
from torch_moe_ops.core.call import ExpertsCall, for_kernels
from torch_moe_ops.core.kernel_facts import Sm90
from torch_moe_ops.core.problem import Problem

SIZE_MULTIPLE = Sm90.BF16_SIZE_MULTIPLE
MIN_TOKENS_OF_EXPERT = 40  # in the mean, from which on these kernels run


def min_tokens(num_experts: int, top_k: int) -> int:
    """From this many tokens on these kernels run (docs/hopper.md). num_experts: of all ranks."""
    return -(-MIN_TOKENS_OF_EXPERT * num_experts // top_k)


def _triton() -> ModuleType:
    # Not at import: that would register it first, and the order is that of preference.
    from torch_moe_ops.backends import triton

    return triton


def _package_reason() -> str | None:
    reason: str | None = _triton().package_reason()
    return reason


def run(call: ExpertsCall, out: Tensor) -> None:
    """Fill `out` [num_tokens, hidden_size] (bfloat16, float16 or float32, contiguous) from a checked call."""
    tokens, top_k = call.topk_ids.shape
    if call.hidden_states.dtype == torch.bfloat16 and tokens >= min_tokens(call.all_experts(), top_k):
        run_kernel(call, out)
    else:
        _triton().run(call, out)


def run_kernel(call: ExpertsCall, out: Tensor) -> None:
    """`run` on these kernels, whatever the number of tokens."""
    check_device(call)
    torch.ops.moeq_C.experts_sm90_bf16(out, *for_kernels(call))


def _sizes_reason(problem: Problem) -> str | None:
    for name in ("hidden_size", "intermediate_size"):
        if getattr(problem, name) % SIZE_MULTIPLE:
            return f"{name} must be a multiple of {SIZE_MULTIPLE}, got {getattr(problem, name)}"
    return None


def _notes(problem: Problem) -> str:
    """From which number of tokens on the kernels are these, and not Triton's."""
    if problem.top_k is None:
        return (
            f"triton's kernels below {MIN_TOKENS_OF_EXPERT} tokens an expert in the mean, and for float16 hidden states"
        )
    tokens = min_tokens(problem.num_experts, problem.top_k)
    return f"triton's kernels below {tokens} tokens, and for float16 hidden states"


register(
    Backend(
        name="cuda_sm90_bf16",
        layout=linear.LINEAR,
        requires=(
            *NEEDS,
            available(_package_reason),
            formats({"none": ("none",)}),
            Requirement(_sizes_reason),
        ),
        prepare=linear.prepare,
        restore=linear.restore,
        run=run,
        notes=_notes,
        delegate="triton",
    )
)
