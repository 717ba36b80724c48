"""How long a replay of a CUDA graph takes, without its launch."""

from __future__ import annotations

import torch

LAUNCH_CYCLES = 200_000  # of the GPU's clock, 0.1 ms, in which the host is to launch a graph


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds on the GPU, which waits in front of it for the launch: that takes longer for more kernels."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(LAUNCH_CYCLES)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3
