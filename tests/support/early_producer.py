"""A producer that lets its dependents start before it has stored anything, as any kernel of a caller's may.

Whatever a dependent reads before it has waited (griddepcontrol.wait) is what the target held before.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

_BLOCK = 1024
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # what is copied, by the size of an element


@triton.jit
def early_kernel(target_ptr, source_ptr, count, delay_ns, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """target[:count] = source[:count], delay_ns after the dependents were let go and the kernel in front was over."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source_ptr + offsets, mask=offsets < count)
    begin = tl_cuda.globaltimer()
    now = begin
    while now - begin < delay_ns:
        now = tl_cuda.globaltimer()
    tl.store(target_ptr + offsets, values, mask=offsets < count)


def produce_early(*pairs: tuple[Tensor, Tensor], delay_us: float = 10.0) -> None:
    """Copy each (target, source) by a launch of its own, on the current stream.

    Every launch triggers at once, so all of them and the kernel behind them begin about together; each stores
    `delay_us` after the one in front has ended.

    Args:
        pairs: contiguous tensors on one CUDA device, of one shape and dtype a pair; elements of 1, 2 or 4 bytes.
        delay_us: microseconds, more than a dependent takes from its start to its first reads.
    """
    for target, source in pairs:
        if target.shape != source.shape or target.dtype != source.dtype:
            raise ValueError(
                f"produce_early: target {tuple(target.shape)} {target.dtype}, source {tuple(source.shape)} {source.dtype}"
            )
        if not (target.is_contiguous() and source.is_contiguous()):
            raise ValueError("produce_early: targets and sources must be contiguous")
        words = _WORDS[target.element_size()]
        early = torch.cuda.get_device_capability(target.device)[0] >= 9
        options: dict[str, Any] = {"launch_pdl": True} if early else {}
        early_kernel[(triton.cdiv(target.numel(), _BLOCK),)](
            target.view(words), source.view(words), target.numel(), int(1000 * delay_us), BLOCK=_BLOCK, PDL=early,
            **options,
        )  # fmt: skip
