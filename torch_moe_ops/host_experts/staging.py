"""Memory and a stream through which the rows of a device's layers reach the CPU and come back."""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
from torch import Tensor

from torch_moe_ops.core.routing_methods import MAX_TOP_K

_WIDEST = 4  # bytes of a value of the hidden states


class Rows(NamedTuple):
    """Some rows of a call, in host memory: what goes there, and the float32 results that come back."""

    hidden_states: Tensor
    places: Tensor
    topk_weights: Tensor
    out: Tensor


class Staging:
    """Host memory for max_tokens rows, pinned where there is a GPU, and the GPU's stream for copies.

    One for all layers of a device that agree in both sizes: their calls follow one another, so that a layer has its
    results before the next one writes its rows. Threads take turns by `lock`, from writing rows until what reads their
    results is enqueued, or on a CPU is done.
    """

    def __init__(self, device: torch.device, max_tokens: int, hidden_size: int) -> None:
        self.max_tokens, self.hidden_size = max_tokens, hidden_size
        self.lock = threading.Lock()
        self.unused: list[int] = []  # jobs of layers that are gone
        pinned = device.type == "cuda"

        def make(size: int, dtype: torch.dtype) -> Tensor:
            with torch.inference_mode(False):  # they are written in that mode and outside of it
                return torch.zeros(size, dtype=dtype, device="cpu", pin_memory=pinned)

        self._hidden = make(max_tokens * hidden_size * _WIDEST, torch.uint8)
        self._places = make(max_tokens * MAX_TOP_K, torch.int32)
        self._weights = make(max_tokens * MAX_TOP_K, torch.float32)
        self._out = make(max_tokens * hidden_size, torch.float32)
        self.stream = torch.cuda.Stream(device) if pinned else None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self._hidden, self._places, self._weights, self._out))

    def is_done(self) -> bool:
        """Wait for all that is enqueued. False where a graph is being captured, which waiting would end."""
        if self.stream is None:
            return True
        if torch.cuda.is_current_stream_capturing():
            return False
        self.stream.synchronize()
        return True

    def rows(self, count: int, top_k: int, dtype: torch.dtype) -> Rows:
        """Views of the first bytes, as `count` rows of a call."""
        hidden = self._hidden[: count * self.hidden_size * dtype.itemsize].view(dtype)
        places, weights = self._places[: count * top_k], self._weights[: count * top_k]
        out = self._out[: count * self.hidden_size]
        return Rows(
            hidden.view(count, self.hidden_size),
            places.view(count, top_k),
            weights.view(count, top_k),
            out.view(count, -1),
        )


# For good: the copies of a graph that outlives its layers write here, and not where others have memory by then.
_KNOWN: dict[tuple[torch.device, int, int], Staging] = {}


def staging_of(device: torch.device, max_tokens: int, hidden_size: int) -> Staging:
    """The one that other layers use, or a new one. Outside of CUDA graphs: it allocates."""
    key = (device, max_tokens, hidden_size)
    found = _KNOWN.get(key)
    if found is None:
        found = _KNOWN[key] = Staging(device, max_tokens, hidden_size)
    return found
