"""Weights as a pass of Triton's kernels multiplies them (on_gpu.py): decoded, a few experts at a time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from torch_moe_ops.backends.triton_engine.backward_pass import Decoder, Pass
from torch_moe_ops.core.devices import processors_of
from torch_moe_ops.core.schemes import ceil_div
from torch_moe_ops.gradients.weights import Projection, decode_projection, decoder_of

WORKSPACE_ELEMENTS = 1 << 24  # weights that are decoded at once: 32 MiB; more where they would leave a GPU idle
MOST_ELEMENTS = 1 << 26  # the same where there is room: fewer launches
PROCESSORS = 132  # where no GPU says how many it has, each with a tile of 128 x 256 results at a time
SHARE_OF_WEIGHTS = 3  # rows to add up that are more than this part of the packed weights come in windows
WINDOWS = 4  # each reads the gradient of GEMM1's results again
WINDOW_COLUMNS = 256  # a multiple of: what `dequantize` begins at, and a tile


class Packed:
    """A projection's weights, and what all Decodings of them share.

    Alphas are in the factor; where gate and up have their own and one_factor is wanted, in the rounded weights.
    """

    def __init__(self, p: Pass, projection: Projection, one_factor: bool = False) -> None:
        self.p, self.projection = p, projection
        self.count, scale_2 = p.sizes.num_experts, projection.stored.scale_2
        self.exact = not one_factor or scale_2 is None or scale_2.numel() == self.count
        self._factor: Tensor | None = None

    def factor_beside(self, decoder: Decoder | None) -> Tensor:
        """What multiplies weights that it leaves, float32 [experts, 1 or halves]; the same tensor each time."""
        if self._factor is None:
            factor, scale_2 = 1.0 if decoder is None else decoder.factor, self.projection.stored.scale_2
            if decoder is not None and self.exact and scale_2 is not None:
                self._factor = scale_2.reshape(self.count, -1) * factor
            else:
                self._factor = self.p.x.new_full((self.count, 1), factor, dtype=torch.float32)
        return self._factor


class Decoding:
    """The weights of all experts, a few at a time, in one workspace for all, as often as they are asked for.

    Args:
        width: how many columns of K are wanted; None: all.
        room: elements that other buffers will take when these weights are gone.
    """

    def __init__(self, packed: Packed, width: int | None = None, room: int = 0) -> None:
        p, projection, count = packed.p, packed.projection, packed.count
        n, k = projection.shape
        self.projection, self.width = projection, width or k
        elements = max(WORKSPACE_ELEMENTS, min(MOST_ELEMENTS, room))
        step = at_once_on_gpu(projection, p.slots.order.shape[0], p.call.all_experts(), self.width, elements)
        step = count if _is_plain(projection) else step
        self.spans = [(first, min(step, count - first)) for first in range(0, count, step)]
        self.space = p.x.new_empty((step if projection.may_have_kernel else 0, n, self.width))
        self.decoder = decoder_of(projection, self.space, packed.exact)
        self.factor = packed.factor_beside(self.decoder)

    def chunks(self, column: int = 0) -> Iterator[tuple[Tensor, int, int]]:
        """What products are called with: weights, bfloat16, of how many experts, and of the first one.

        There may be room for more experts. column: the first one, a multiple of WINDOW_COLUMNS.
        """
        if self.decoder is not None:
            run, space = self.decoder.run, self.space
            for first, here in self.spans:
                run(first, here, column)
                yield space, first, here
            return
        for first, here in self.spans:
            weights = decode_projection(self.projection, slice(first, first + here), torch.bfloat16)
            if self.width != weights.shape[2]:
                weights = weights[:, :, column : column + self.width].contiguous()
            yield weights, first, here


def at_once_on_gpu(
    projection: Projection, rows: int, all_experts: int, width: int | None = None, elements: int | None = None
) -> int:
    """How many experts' weights are decoded at once: what `elements` hold, or else what keeps a GPU busy; of nearly as
    many, what leaves the fewest multiprocessors without a tile in the last round.

    rows: of all experts together, those of other ranks (all_experts) included. width: columns of K; None: all.
    elements: None: WORKSPACE_ELEMENTS.
    """
    (n, k), weight = projection.shape, projection.stored.weight
    processors = processors_of(weight.device) if weight.is_cuda else PROCESSORS
    at_once = _at_once(n, width or k, rows, all_experts, elements or WORKSPACE_ELEMENTS, processors)
    return min(projection.sizes.num_experts, at_once)


@lru_cache(maxsize=1024)
def _at_once(n: int, width: int, rows: int, all_experts: int, elements: int, processors: int) -> int:
    # Half a tile more than rows fill: of random numbers of rows, the last tile is half empty in the mean.
    halves = (2 * ceil_div(rows, 128 * all_experts) + 1) * ceil_div(min(n, width), 256)
    most = max(1, elements // (n * width), ceil_div(3 * processors, halves))

    def use(experts: int) -> tuple[float, int]:
        tiles = ceil_div(experts * halves, 2)
        return tiles / (ceil_div(tiles, processors) * processors), experts

    return max(range(ceil_div(most, 2), most + 1), key=use)


def windows_of_hidden(p: Pass, projection: Projection) -> list[slice]:
    """Columns of hidden states whose gradients are made at once, one after the other. projection: w13."""
    size, packed = p.sizes.hidden_size, p.call.w13.nbytes + p.call.w2.nbytes
    rows = 2 * p.slots.order.shape[0] * size
    windows = WINDOWS if projection.may_have_kernel and rows > packed // SHARE_OF_WEIGHTS else 1
    width = ceil_div(ceil_div(size, windows), WINDOW_COLUMNS) * WINDOW_COLUMNS
    return [slice(first, min(first + width, size)) for first in range(0, size, width)]


def _is_plain(projection: Projection) -> bool:
    return projection.stored.weight.dtype == torch.bfloat16
