"""Compiled kernels launched by Triton's C code, without the Python that Triton runs around it at each launch.

What that Python does is done once for a pass: the stream is asked for, and whether anybody has set hooks; addresses
stand for tensors. The arguments of the C code are no interface, so that only releases are served whose are known, and
that were tried on a GPU (RELEASES); a test compares them with what Triton hands on. Others launch as Triton does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime import driver

RELEASES = ("3.6.",)
_ONES: tuple[tuple[int, ...], ...] = ((), (1, 1), (1,), ())  # behind a grid of so many numbers

Launching = Callable[[tuple[int, ...], tuple[int, ...]], None]  # called with a grid, and numbers


class Direct:
    """Launches of a compiled kernel."""

    def __init__(self, compiled: Any) -> None:
        run, no_hooks, no_scratch = compiled.run, (None, None, None), (None, None)
        attributes = (run.launch_cooperative_grid, run.launch_pdl)
        self.launch = run.launch
        self.head = (compiled.function, *attributes, *no_scratch, compiled.packed_metadata, *no_hooks)
        self.stream_of = driver.active.get_current_stream

    def bound(self, device: int, values: list[Any], constants: tuple[Any, ...]) -> Launching | None:
        """On the current stream of a device. values: addresses, floats. None: somebody wants to see each launch."""
        runtime = triton.knobs.runtime
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            return None
        launch, given = self.launch, (self.stream_of(device), *self.head, *values)

        def launching(grid: tuple[int, ...], numbers: tuple[int, ...]) -> None:
            launch(*grid, *_ONES[len(grid)], *given, *numbers, *constants)

        return launching


def direct_of(compiled: Any) -> Direct | None:
    """None where Triton has to launch: of another release, or a kernel that wants memory of its own."""
    run = compiled.run
    if not triton.__version__.startswith(RELEASES) or not isinstance(run, CudaLauncher):
        return None
    return None if run.global_scratch_size or run.profile_scratch_size else Direct(compiled)
