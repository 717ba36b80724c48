"""Building and tuning FlashInfer's kernels ahead of the first call, and of any graph capture."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torch_moe_ops.prepared.prepared_weights import PreparedWeights

TOKENS = (1, 64, 1024, 8192)


def warmup(
    w: PreparedWeights,
    top_k: int,
    tokens: Sequence[int] = TOKENS,
    dtype: torch.dtype = torch.bfloat16,
    progress: Callable[[str], None] = print,
) -> None:
    """Run a layer's routed op once per token count under FlashInfer's autotuner.

    It loads the module (which may compile it) and measures tactics, which takes seconds to minutes; `progress`
    is told before each step. Calls afterwards only look results up, so that they can be captured in a CUDA graph.
    Nothing is tuned elsewhere: an op that was not warmed up takes the kernels' own choice.

    Args:
        w: prepared for a FlashInfer backend. tokens: how many steps there are, and how large.

    Raises ValueError for other backends, RuntimeError while a CUDA graph is being captured.
    """
    if not w.backend.startswith("flashinfer"):
        raise ValueError(f"warmup: w.backend must be a FlashInfer backend, got {w.backend!r}")
    if w.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("warmup: must not run while a CUDA graph is being captured")
    from torch_moe_ops.backends.flashinfer import package
    from torch_moe_ops.prepared.fused import fused_moe_routed

    tuner = package.module("flashinfer").autotune
    for count in tokens:
        progress(f"{w.backend}: {w.scheme}, {w.num_local_experts} experts, {count} tokens")
        x = torch.randn(count, w.hidden_size, device=w.device).to(dtype)
        ids = torch.arange(count * top_k, device=w.device).view(count, top_k) % w.num_local_experts
        ids += w.local_expert_offset
        weights = torch.full((count, top_k), 1 / top_k, dtype=torch.float32, device=w.device)
        with tuner(True):
            fused_moe_routed(x, ids.to(torch.int32), weights, w)
