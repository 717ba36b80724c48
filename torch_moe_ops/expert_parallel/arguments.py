"""What a rank refuses by itself: a constructor before the ranks compare what they say, a call before it sends."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.prepared.prepared_weights import PreparedWeights
from torch_moe_ops.transports.exchange import ALONE
from torch_moe_ops.transports.partial_rows import WIRE_DTYPES
from torch_moe_ops.transports.registry import check_name

PARTIAL_DTYPES = (torch.float32, torch.bfloat16, *WIRE_DTYPES)


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


def computed_and_sent(partial_dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype | None]:
    """The dtype of the experts' results, and what ep_combine makes of them to send them, None: nothing."""
    return (torch.float32, partial_dtype) if partial_dtype in WIRE_DTYPES else (partial_dtype, None)


def check_call(hidden_states: Tensor, hidden_size: int, most: int, max_tokens: int | None, capacity: int) -> int:
    """Rows of a rank in this call. Raises what would leave the other ranks waiting, and says so.

    Args:
        hidden_states: of this rank; max_tokens: of the call.
        hidden_size, most, capacity: of the layer, max_tokens_per_rank and 0 for no capacity.
    """
    rows = most if max_tokens is None else max_tokens
    if not 1 <= rows <= most:
        raise ValueError(f"ExpertParallel: max_tokens must be in 1 ... {most}, got {max_tokens}{ALONE}")
    if hidden_states.shape[-1] != hidden_size:
        shape = tuple(hidden_states.shape)
        raise ValueError(f"ExpertParallel: hidden_states must be [..., {hidden_size}], got {shape}{ALONE}")
    if capacity and torch.compiler.is_compiling():
        raise RuntimeError("ExpertParallel: capacity must be None where it is traced: an overflow is told by the host")
    return rows
