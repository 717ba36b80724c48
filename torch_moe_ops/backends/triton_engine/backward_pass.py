"""What the kernels of a pass with gradients or adapters work on, without Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.core.layout import Sizes

RANK_CHUNK = 16  # ranks at a time of the Hopper kernels (csrc/cuda/sm90/problem/tiled_problem.h)


class Slots(NamedTuple):
    """The slots of topk_ids, those of local experts first, ascending by expert, then by slot; int32.

    order: [num_tokens * top_k], token * top_k + j; token: that of each; expert: the local one, the number of experts
    for foreign ids. ends: [num_experts], the place behind each expert's last slot. place: of each slot, its place in
    the order; None where nobody has asked yet.
    """

    order: Tensor
    token: Tensor
    expert: Tensor
    ends: Tensor
    place: Tensor | None = None

    def places(self) -> Tensor:
        """`place`, made where it is not there."""
        if self.place is not None:
            return self.place
        place = torch.empty_like(self.order)
        place[self.order.long()] = torch.arange(place.shape[0], dtype=place.dtype, device=place.device)
        return place


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


class Decoder(NamedTuple):
    """What fills a workspace [step, rows, width] with a projection of some experts.

    factor: what `run` leaves has to be multiplied by it. run: (first expert, how many, at most `step`, first column, a
    multiple of 256).
    """

    factor: float
    run: Callable[[int, int, int], None]


class RanksBySlot(NamedTuple):
    """Adapters beside a product whose rows are by slot: the factor times what its other one made of them.

    low: bfloat16 [slots, chunks, 2, RANK_CHUNK]: numbers, then what rounding took of them; zeros beyond the ranks.
    factor: bfloat16 [experts, rows of the weights, ranks], contiguous, ranks a multiple of 8.
    """

    low: Tensor
    factor: Tensor


class BySlot(Protocol):
    """Both products of a layer by kernels of its own, from packed weights, for who adds up its rows: first GEMM1, once,
    then GEMM2. Rows are bfloat16 and by slot; those of experts elsewhere stay as they were."""

    def hidden(self, addend: RanksBySlot | None, out: Tensor | None) -> None:
        """The intermediate, [slots, intermediate_size], in `out` where it is given."""

    def output(self, addend: RanksBySlot | None, out: Tensor) -> None:
        """What GEMM2 makes of it, with w2_bias, in `out` [slots, hidden_size]."""
