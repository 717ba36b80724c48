"""Working memory of FlashInfer's CUTLASS kernels: a tensor of every call's own.

Nothing is kept from one call to the next. While a CUDA graph is captured, the memory is then of the graph's pool, as
that of every other intermediate result: a call outside can neither replace nor free it. During a warm-up whose
allocations go to a pool, nothing of that pool outlives the call. PyTorch's caching allocator makes it cheap (2 us).
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_moe_ops.backends.flashinfer import package

SIZE_FUNCTION = "cutlass_fused_moe_workspace_size"


class Sizes(NamedTuple):
    """What the size of a workspace follows from. num_experts: of all ranks."""

    tokens: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int


def workspace(
    sizes: Sizes,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    activation: int,
    ranks: tuple[int, int],
    flags: dict[str, bool],
    device: torch.device,
) -> Tensor | None:
    """uint8 [at least as many bytes as are needed], or None where the installed release takes none.

    Token counts are rounded up to a power of two, so that few sizes are asked for.

    Args:
        dtypes: of hidden states, weights and output. ranks: ep_size, ep_rank.
    """
    if package.entry(SIZE_FUNCTION).function is None:
        return None
    rounded = sizes._replace(tokens=1 << max(sizes.tokens - 1, 0).bit_length())
    needed = _bytes_needed(rounded, dtypes, activation, ranks, tuple(sorted(flags.items())), device)
    return torch.empty(needed, dtype=torch.uint8, device=device)


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
