"""Launches of kernels that an earlier launch has found: Triton's own look-up takes three times what a launch does.

What is compared instead of all that Triton asks: the device, numbers that it may specialize, dtypes of tensors and
whether they are aligned; and of constants, who keeps them (Launch) or they themselves (Repeated). No tensor is kept.
Of what Triton does around a launch, a remembered kernel has the hooks of its entry and exit, but neither pre-run hooks
of its own nor modes of Triton's that were set after it was found (debugging, instrumentation).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import attrgetter, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

_MOST = 1024  # kernels that are remembered, far more than a process uses
_dtype_of, _address_of = attrgetter("dtype"), Tensor.data_ptr
_Launching = Callable[[tuple[int, ...], tuple[int, ...]], None]


class _Found(NamedTuple):
    kernel: Any  # whose id is in the key: nobody else has it while this is here
    compiled: Any
    constants: tuple[Any, ...]  # in the kernel's order
    direct: Any  # a direct.Direct, or None

    def bound(self, device: int, tensors: tuple[Any, ...], values: list[Any]) -> _Launching:
        """Launches on the current stream, called with a grid and numbers. values: tensors' addresses, floats."""
        _, compiled, constants, direct = self
        launch = None if direct is None else direct.bound(device, values, constants)
        if launch is not None:
            return launch  # type: ignore[no-any-return]
        return lambda grid, numbers: compiled[(*grid, 1, 1)[:3]](*tensors, *numbers, *constants)


FOUND: dict[tuple[Any, ...], _Found] = {}


class Launch:
    """The constants of a kernel's launches. To be kept, by all that they follow from, for who launches it again.

    Args:
        free: Triton does not specialize the numbers, which have 32 bits and may be others at each launch.
    """

    def __init__(self, num_warps: int = 4, free: bool = False, **constants: Any) -> None:
        self.num_warps, self.free, self.constants = num_warps, free, constants

    def __call__(self, kernel: Any, grid: tuple[int, ...], tensors: tuple[Tensor, ...], *numbers: int) -> None:
        if not tensors[0].is_cuda:  # in Triton's interpreter
            kernel[grid](*tensors, *numbers, num_warps=self.num_warps, **self.constants)
            return
        device, addresses = torch.cuda.current_device(), [*map(_address_of, tensors)]
        key = (self, id(kernel), () if self.free else numbers, *_seen(device, tensors, addresses))
        found = FOUND.get(key)
        if found is not None:
            found.bound(device, tensors, addresses)(grid, numbers)
            return
        compiled = kernel[grid](*tensors, *numbers, num_warps=self.num_warps, **self.constants)
        _remember(key, kernel, compiled, self.constants)


class Repeated:
    """Launches of one kernel that differ in grids and numbers alone: what a launch costs in Python is paid once.

    The kernel's parameters are tensors (the same at each launch), floats, numbers that it does not specialize, and
    constants. The first launch of a process goes through Triton's look-up, others to the kernel that it found. To be
    dropped with the pass that made it: launches are on the stream that was the current one at the first.
    """

    def __init__(self, kernel: Any, tensors: tuple[Any, ...], options: dict[str, int] | None = None, **constants: Any):
        self.kernel, self.tensors, self.options, self.constants = kernel, tensors, options or {}, constants
        self.launch: _Launching | None = None

    def __call__(self, grid: tuple[int, ...], *numbers: int) -> None:
        if self.launch is not None:
            self.launch(grid, numbers)
        elif self.tensors[0].is_cuda:
            self.launch = self._first(grid, numbers)
        else:  # in Triton's interpreter
            self._look_up(grid, numbers)

    def _first(self, grid: tuple[int, ...], numbers: tuple[int, ...]) -> _Launching | None:
        """Launches, and returns what launches again."""
        given, constants = self.tensors, self.constants
        tensors = [value for value in given if isinstance(value, Tensor)]
        device, addresses = torch.cuda.current_device(), [*map(_address_of, tensors)]
        seen = _seen(device, tensors, addresses)
        key = (id(self.kernel), *self.options.items(), *constants, *constants.values(), *seen)
        found = FOUND.get(key)
        if found is not None:
            launch = found.bound(device, given, [*addresses, *given[len(tensors) :]])
            launch(grid, numbers)
            return launch
        found = _remember(key, self.kernel, self._look_up(grid, numbers), constants)
        return None if found is None else found.bound(device, given, [*addresses, *given[len(tensors) :]])

    def _look_up(self, grid: tuple[int, ...], numbers: tuple[int, ...]) -> Any:
        return self.kernel[grid](*self.tensors, *numbers, **self.constants, **self.options)


def _remember(key: tuple[Any, ...], kernel: Any, compiled: Any, constants: dict[str, Any]) -> _Found | None:
    if compiled is None:  # a stand-in's
        return None
    if len(FOUND) >= _MOST:
        FOUND.clear()
    ordered = tuple(constants[name] for name in kernel.arg_names if name in constants)
    found = FOUND[key] = _Found(kernel, compiled, ordered, _direct_of(compiled))
    return found


def _direct_of(compiled: Any) -> Any:
    from torch_moe_ops.backends.triton_engine.direct import direct_of  # without Triton nothing is compiled

    return direct_of(compiled)


def _seen(device: int, tensors: Sequence[Tensor], addresses: list[int]) -> tuple[Any, ...]:
    """What a kernel is compiled for: the device, whether addresses are aligned, dtypes."""
    aligned: Any = reduce(or_, addresses) % 16 == 0
    if not aligned:
        aligned = tuple(address % 16 == 0 for address in addresses)
    return (device, aligned, *map(_dtype_of, tensors))
