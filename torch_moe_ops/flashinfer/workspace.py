"""One workspace per device and stream for FlashInfer's CUTLASS kernels, which else allocate one in every call."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_moe_ops.flashinfer import package

SIZE_FUNCTION = "cutlass_fused_moe_workspace_size"


class Sizes(NamedTuple):
    """What the size of a workspace follows from. num_experts: of all ranks."""

    tokens: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int


_BUFFERS: dict[tuple[torch.device, int], Tensor] = {}


def workspace(
    sizes: Sizes,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    activation: int,
    ranks: tuple[int, int],
    flags: dict[str, bool],
    device: torch.device,
) -> Tensor | None:
    """uint8 [at least as many bytes as are needed], or None where the kernel has to allocate its own.

    It does where the installed release takes none, and where a CUDA graph is captured and the kept one is
    too small (a kept buffer must not come from a graph's pool). Token counts are rounded up to a power of two.

    Args:
        dtypes: of hidden states, weights and output. ranks: ep_size, ep_rank.
    """
    if package.entry(SIZE_FUNCTION).function is None:
        return None
    rounded = sizes._replace(tokens=1 << max(sizes.tokens - 1, 0).bit_length())
    needed = _bytes_needed(rounded, dtypes, activation, ranks, tuple(sorted(flags.items())), device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    kept = _BUFFERS.get((device, stream))
    if kept is not None and kept.numel() >= needed:
        return kept
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    _BUFFERS[device, stream] = torch.empty(needed, dtype=torch.uint8, device=device)
    return _BUFFERS[device, stream]


@cache
def _bytes_needed(
    sizes: Sizes,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    activation: Any,
    ranks: tuple[int, int],
    flags: tuple[tuple[str, bool], ...],
    device: torch.device,
) -> int:
    x, weight, output = dtypes
    return package.entry(SIZE_FUNCTION).value(
        {"use_fused_finalize": False},  # the device is the current one
        max_num_tokens=sizes.tokens,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_experts_total=sizes.num_experts,
        top_k=sizes.top_k,
        x_dtype=x,
        weight_dtype=weight,
        output_dtype=output,
        activation_type=activation,
        ep_size=ranks[0],
        ep_rank=ranks[1],
        **dict(flags),
    )


def release() -> None:
    """Give all kept workspaces back. Not while a CUDA graph that holds one may run again."""
    _BUFFERS.clear()
