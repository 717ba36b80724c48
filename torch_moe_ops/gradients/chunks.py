"""Weights as a pass of Triton's kernels multiplies them (on_gpu.py): decoded, a few experts at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torch_moe_ops.backends.registry import Backend
from torch_moe_ops.backends.triton_engine.backward_pass import Pass
from torch_moe_ops.core.schemes import ceil_div
from torch_moe_ops.gradients.weights import Projection, decode_projection, decoder_of, projection_of

WORKSPACE_ELEMENTS = 1 << 24  # weights that are decoded at once: 32 MiB; more where they would leave a GPU idle
MOST_ELEMENTS = 1 << 26  # the same where there is room: fewer launches
PROCESSORS = 132  # of a GPU, each with a tile of 128 x 256 results at a time
SHARE_OF_WEIGHTS = 3  # rows to add up that are more than this part of the packed weights come in windows
WINDOWS = 4  # each reads the gradient of GEMM1's results again
WINDOW_COLUMNS = 256  # a multiple of: what `dequantize` begins at, and a tile


class Chunk(NamedTuple):
    """Weights of so many `experts` from `first` on, as products take them, bfloat16, and what has to multiply them.

    weights: of these experts at first, maybe room for more. factor: float32 [E, 1 or halves], of all experts.
    """

    first: int
    experts: int
    weights: Tensor
    factor: Tensor


class Decoding:
    """The weights of all experts, a few at a time, in one workspace for all, as often as they are asked for.

    Alphas are in the factor; where gate and up have their own and one_factor is wanted, in the rounded weights.

    Args:
        width: how many columns of K are wanted; None: all.
        room: elements that other buffers will take when these weights are gone.
    """

    def __init__(
        self, p: Pass, backend: Backend, name: str, one_factor: bool = False, width: int | None = None, room: int = 0
    ) -> None:
        projection, count = projection_of(p.call, name, backend, p.sizes), p.sizes.num_experts
        (n, k), scale_2 = projection.shape, projection.stored.scale_2
        self.projection, self.count, self.width = projection, count, width or k
        pairs, all_experts = p.slots.order.shape[0], p.call.all_experts()
        elements = max(WORKSPACE_ELEMENTS, min(MOST_ELEMENTS, room))
        step = at_once_on_gpu(projection, pairs, all_experts, self.width, elements)
        self.step = count if _is_plain(projection) else step
        self.space = p.x.new_empty((self.step if projection.may_have_kernel else 0, n, self.width))
        exact = not one_factor or scale_2 is None or scale_2.numel() == count
        self.decoder = decoder_of(projection, self.space, exact)
        factor = 1.0 if self.decoder is None else self.decoder.factor
        self.factor = p.x.new_full((count, 1), factor, dtype=torch.float32)
        if self.decoder is not None and exact and scale_2 is not None:
            self.factor = self.factor * scale_2.reshape(count, -1)

    def chunks(self, column: int = 0) -> Iterator[Chunk]:
        """column: the first one, a multiple of WINDOW_COLUMNS."""
        for first in range(0, self.count, self.step):
            here = min(self.step, self.count - first)
            if self.decoder is not None:
                self.decoder.run(first, here, column)
                yield Chunk(first, here, self.space, self.factor)
                continue
            weights = decode_projection(self.projection, slice(first, first + here), torch.bfloat16)
            if self.width != weights.shape[2]:
                weights = weights[:, :, column : column + self.width].contiguous()
            yield Chunk(first, here, weights, self.factor)


def at_once_on_gpu(
    projection: Projection, rows: int, all_experts: int, width: int | None = None, elements: int | None = None
) -> int:
    """How many experts' weights are decoded at once: what `elements` hold, or else what keeps a GPU busy; of nearly as
    many, what leaves the fewest multiprocessors without a tile in the last round.

    rows: of all experts together, those of other ranks (all_experts) included. width: columns of K; None: all.
    elements: None: WORKSPACE_ELEMENTS.
    """
    n, k = projection.shape
    width = width or k
    # Half a tile more than rows fill: of random numbers of rows, the last tile is half empty in the mean.
    halves = (2 * ceil_div(rows, 128 * all_experts) + 1) * ceil_div(min(n, width), 256)
    most = max(1, (elements or WORKSPACE_ELEMENTS) // (n * width), ceil_div(3 * PROCESSORS, halves))

    def use(experts: int) -> tuple[float, int]:
        tiles = ceil_div(experts * halves, 2)
        return tiles / (ceil_div(tiles, PROCESSORS) * PROCESSORS), experts

    return min(projection.sizes.num_experts, max(range(ceil_div(most, 2), most + 1), key=use))


def windows_of_hidden(p: Pass, backend: Backend) -> list[slice]:
    """Columns of hidden states whose gradients are made at once, one after the other."""
    projection, size = projection_of(p.call, "w13", backend, p.sizes), p.sizes.hidden_size
    packed = p.call.w13.nbytes + p.call.w2.nbytes
    rows = 2 * p.slots.order.shape[0] * size
    windows = WINDOWS if projection.may_have_kernel and rows > packed // SHARE_OF_WEIGHTS else 1
    width = ceil_div(ceil_div(size, windows), WINDOW_COLUMNS) * WINDOW_COLUMNS
    return [slice(first, min(first + width, size)) for first in range(0, size, width)]


def _is_plain(projection: Projection) -> bool:
    return projection.stored.weight.dtype == torch.bfloat16
