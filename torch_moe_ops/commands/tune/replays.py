"""How long a replay of a CUDA graph takes, without its launch."""

from __future__ import annotations

import torch


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds on the GPU. Another replay goes before, so that the host is ahead when the timed one begins."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3
