"""Launches of one kernel that differ in numbers alone: what a launch costs in Python is paid once."""

from __future__ import annotations

from typing import Any


class Repeated:
    """A kernel whose parameters are tensors, then numbers that it does not specialize, then constants.

    The first launch goes through Triton's look-up, which takes most of a launch's time; those after it go to the kernel
    that it found. Tensors are the same at each launch.
    """

    def __init__(self, kernel: Any, tensors: tuple[Any, ...], options: dict[str, int] | None = None, **constants: Any):
        self.kernel, self.tensors, self.options, self.constants = kernel, tensors, options or {}, constants
        self.compiled: Any = None

    def __call__(self, grid: tuple[int, ...], *numbers: int) -> None:
        if self.compiled is not None:
            self.compiled[(*grid, 1, 1)[:3]](*self.tensors, *numbers, *self.constants.values())
            return
        # Nothing comes back in Triton's interpreter.
        self.compiled = self.kernel[grid](*self.tensors, *numbers, **self.constants, **self.options)
        if self.compiled is not None:
            names = self.kernel.arg_names[len(self.tensors) + len(numbers) :]
            self.constants = {name: self.constants[name] for name in names}
