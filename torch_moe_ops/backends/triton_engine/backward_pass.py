"""What the kernels of a backward pass work on: plain values, without Triton."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.core.layout import Sizes


class Slots(NamedTuple):
    """The slots of topk_ids, those of local experts first, ascending by expert, then by slot; int32.

    order: [num_tokens * top_k], token * top_k + j; token: that of each; expert: the local one, the number of experts
    for foreign ids. ends: [num_experts], the place behind each expert's last slot.
    """

    order: Tensor
    token: Tensor
    expert: Tensor
    ends: Tensor


class Pass(NamedTuple):
    """One backward pass of a layer whose activations nothing rounds.

    x: what GEMM1 multiplied, grad: the gradient of the output, bfloat16 [num_tokens, hidden_size], contiguous. biases:
    float32, in checkpoint order. weighted: routing weights multiply the output; else they are in x.
    """

    call: ExpertsCall
    sizes: Sizes
    x: Tensor
    grad: Tensor
    biases: tuple[Tensor | None, Tensor | None]
    weighted: bool
    slots: Slots
