"""Adapters of a layer's experts: vLLM's stacks of them become views of the factors that `moe.Lora` takes.

vLLM writes an adapter into its slot of the stacks, also between replays of a CUDA graph. As views of the factors, they
bring it to where the op reads it: nothing is copied in a forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.prepared.lora import Lora


def check_lora(parallel: Any, config: Any, interleaved: bool) -> None:
    """Raises ValueError saying what the layer must be, where it and its adapters are left to vLLM.

    Args:
        parallel: vLLM's FusedMoEParallelConfig of the layer.
        config: vLLM's LoRAConfig.
        interleaved: rows of w13 alternate between gate and up in the checkpoint.
    """
    if parallel.use_ep or parallel.dp_size > 1:
        raise ValueError("expert and data parallelism must be off with LoRA: adapters of exchanged tokens are vLLM's")
    for name in ("fully_sharded_loras", "enable_moe_shared_loras"):
        if getattr(config, name, False):
            raise ValueError(f"{name} must be off: factors are one tensor of all ranks and experts here")
    if interleaved:
        raise ValueError("rows of w13 must be gates before ups with LoRA, got them interleaved")


def adopt(a_stacked: Sequence[Tensor], b_stacked: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Factors of one projection with the values of vLLM's stacks, which are views of them from now on.

    Args:
        a_stacked: a tensor [adapters, experts, r, K] for each slice: gate and up of w13, which then have factors A of
            their own, or one for all rows.
        b_stacked: as many, [adapters, experts, rows of the slice, r].

    Returns: A [experts, adapters * slices * r, K] and B [experts, rows of all slices, adapters * slices * r]: the ranks
        of a slice are zero for the rows of another.
    Raises: ValueError where slices do not match, or one expert stands for all.
    """
    first, slices = a_stacked[0], len(a_stacked)
    adapters, experts, ranks, k = first.shape
    rows = [t.shape[2] for t in b_stacked]
    wanted = [(adapters, experts, ranks, k)] * slices + [(adapters, experts, n, ranks) for n in rows]
    got = [tuple(t.shape) for t in (*a_stacked, *b_stacked)]
    if got != wanted or len(rows) != slices:
        raise ValueError(
            f"stacks of adapters must be [adapters, experts, r, K] and [adapters, experts, rows, r], got {got}"
        )
    a = first.new_zeros(experts, adapters, slices, ranks, k)
    b = first.new_zeros(experts, sum(rows), adapters, slices, ranks)
    begin = 0
    for i, (of_a, of_b) in enumerate(zip(a_stacked, b_stacked, strict=True)):
        _become(of_a, a[:, :, i].transpose(0, 1))
        _become(of_b, b[:, begin : begin + rows[i], :, i].permute(2, 0, 1, 3))
        begin += rows[i]
    return a.flatten(1, 3), b.flatten(2)


def _become(stack: Tensor, view: Tensor) -> None:
    """Move the values of a tensor that others hold, too, to where `view` is. The memory that it had is freed."""
    view.copy_(stack)
    before = stack.untyped_storage()
    stack.set_(view.untyped_storage(), view.storage_offset(), view.size(), view.stride())
    # vLLM keeps views of it for their shapes and dtypes alone.
    before.resize_(0)


class Adapters:
    """Those of one layer, from vLLM's MoELoRAContext, whose stacks they adopt."""

    def __init__(self, context: Any) -> None:
        a13, b13 = adopt(context.w13_lora_a_stacked, context.w13_lora_b_stacked)
        a2, b2 = adopt(context.w2_lora_a_stacked, context.w2_lora_b_stacked)
        # vLLM multiplies B by the scaling when it loads an adapter.
        scaling = torch.ones(context.max_loras, dtype=torch.float32, device=a13.device)
        self.lora = Lora(a13, b13, a2, b2, scaling)
        self._of_tokens: Tensor = context.punica_wrapper._token_lora_indices

    def ids(self, tokens: int) -> Tensor:
        """int32 [tokens]: each token's adapter. Of those that pad a batch it may be any number."""
        return self._of_tokens[:tokens].to(torch.int32)
