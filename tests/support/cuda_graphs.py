"""A step as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def captured(step: Callable[[], Tensor], keep_graph: bool = False) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """The graph of step(), and the result that its replays fill. keep_graph: its nodes can be asked for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=keep_graph)
    # Other threads (a process group's watchdog) may ask CUDA things meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = step()
    if keep_graph:
        graph.instantiate()
    return graph, out
