"""Huge pages for weights, where the system gives them."""

from __future__ import annotations

import ctypes
import sys

from torch import Tensor

PAGE = 1 << 21
_MADV_HUGEPAGE = 14  # of Linux


def with_huge_pages(fresh: Tensor) -> Tensor:
    """`fresh`, a CPU tensor that nothing was written to yet, with the wish that Linux backs it by pages of 2 MiB.

    The kernels then miss fewer translations of addresses as they stream weights. A wish: a system that has no such
    pages, or none to give, uses its usual ones. Tensors that hold no whole page of this size stay as they are.
    """
    if sys.platform != "linux" or type(fresh) is not Tensor or fresh.device.type != "cpu":
        return fresh
    begin = -(-fresh.data_ptr() // PAGE) * PAGE
    end = (fresh.data_ptr() + fresh.nbytes) // PAGE * PAGE
    if begin < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(_MADV_HUGEPAGE))
    return fresh
