"""What a kernel does that may begin while the one in front of it in the stream still runs (docs/design.md, section 11).

PDL: whether it was launched so (programmatic dependent launch, SM90 and later).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda


@triton.jit
def wait_for_previous_kernel(PDL: tl.constexpr):
    """Wait until all kernels in front are over and what they wrote is visible; then let the next one begin.

    Every program of every kernel comes here, whatever it has to do. In this order: once the next kernel begins, all in
    front of this one are over, which load_settled relies on.
    """
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()


@triton.jit
def load_settled(pointer, EARLY: tl.constexpr):
    """A value; where it is read before waiting (EARLY), one that the kernel in front waited for and does not write.

    Then from the L2: no wait of this program's own vouches for what the L1 holds.
    """
    return tl.load(pointer, cache_modifier=".cg") if EARLY else tl.load(pointer)
