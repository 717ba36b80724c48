"""What a layer's constructor refuses by itself, before the ranks compare what they say."""

from __future__ import annotations

from typing import Any

import torch

from torch_moe_ops.prepared.prepared_weights import PreparedWeights
from torch_moe_ops.transports.registry import check_name

PARTIAL_DTYPES = (torch.float32, torch.bfloat16)


def check_arguments(
    w: Any, max_tokens_per_rank: int, transport: str, partial_dtype: torch.dtype, capacity: int | None
) -> None:
    """TypeError or ValueError: names what is required, and what came."""
    if not isinstance(w, PreparedWeights):
        raise TypeError(f"ExpertParallel: w must be PreparedWeights, got {type(w).__name__}")
    if isinstance(max_tokens_per_rank, bool) or not isinstance(max_tokens_per_rank, int) or max_tokens_per_rank < 1:
        raise ValueError(f"ExpertParallel: max_tokens_per_rank must be at least 1, got {max_tokens_per_rank!r}")
    if isinstance(capacity, (bool, float)) or (capacity is not None and not 1 <= capacity <= max_tokens_per_rank):
        text = f"be None or in 1 ... max_tokens_per_rank = {max_tokens_per_rank}"
        raise ValueError(f"ExpertParallel: capacity must {text}, got {capacity!r}")
    if partial_dtype not in PARTIAL_DTYPES:
        names = [str(dtype) for dtype in PARTIAL_DTYPES]
        raise ValueError(f"ExpertParallel: partial_dtype must be one of {names}, got {partial_dtype}")
    check_name(transport)
