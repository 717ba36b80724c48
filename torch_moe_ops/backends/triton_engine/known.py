"""Launches of kernels that an earlier launch has found: Triton's own look-up takes three times what a launch does.

What is compared instead of all that Triton asks: the device, numbers that it may specialize, dtypes of tensors and
whether they are aligned; and of constants, who keeps them (Launch) or they themselves (Known). No tensor is kept.
Of what Triton does around a launch, a remembered kernel has the hooks of its entry and exit, but neither pre-run hooks
of its own nor modes of Triton's that were set after it was found (debugging, instrumentation).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, reduce
from operator import attrgetter, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_moe_ops.backends.triton_engine.repeated import Repeated

_MOST = 1024  # kernels that are remembered, far more than a process uses
_dtype_of = attrgetter("dtype")


class _Found(NamedTuple):
    kernel: Any  # whose id is in the key: nobody else has it while this is here
    compiled: Any
    constants: tuple[Any, ...]  # in the kernel's order


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
        key = (self, id(kernel), () if self.free else numbers, *_of_tensors(tensors))
        found = FOUND.get(key)
        if found is not None:
            found.compiled[(*grid, 1, 1)[:3]](*tensors, *numbers, *found.constants)
            return
        compiled = kernel[grid](*tensors, *numbers, num_warps=self.num_warps, **self.constants)
        _remember(key, kernel, compiled, self.constants)


class Known(Repeated):
    """A Repeated, of one grid, that begins with the kernel that one like it has found, in this call or before it."""

    def __init__(self, kernel: Any, tensors: tuple[Any, ...], options: dict[str, int] | None = None, **constants: Any):
        super().__init__(kernel, tensors, options, **constants)
        self.run: Callable[..., None] | None = None
        self.values: tuple[Any, ...] = ()

    @staticmethod
    def of(launch: Repeated) -> Known:
        """The same, of a Repeated that was not launched yet."""
        return Known(launch.kernel, launch.tensors, launch.options, **launch.constants)

    def __call__(self, grid: tuple[int, ...], *numbers: int) -> None:
        if self.run is not None:
            self.run(*self.tensors, *numbers, *self.values)
            return
        key = self._key() if self.tensors[0].is_cuda else None
        found = None if key is None else FOUND.get(key)
        if found is not None:
            self.run, self.values = found.compiled[(*grid, 1, 1)[:3]], found.constants
            self.run(*self.tensors, *numbers, *self.values)
            return
        compiled = self.kernel[grid](*self.tensors, *numbers, **self.constants, **self.options)
        if key is not None:
            _remember(key, self.kernel, compiled, self.constants)

    def _key(self) -> tuple[Any, ...]:
        tensors, constants = self.tensors, self.constants
        while isinstance(tensors[-1], float):  # which Triton does not specialize
            tensors = tensors[:-1]
        return (id(self.kernel), *self.options.values(), *constants, *constants.values(), *_of_tensors(tensors))


def _of_tensors(tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """What a kernel is compiled for: the device, whether addresses are aligned, dtypes."""
    aligned: Any = reduce(or_, map(Tensor.data_ptr, tensors)) % 16 == 0
    if not aligned:
        aligned = tuple(t.data_ptr() % 16 == 0 for t in tensors)
    return (torch.cuda.current_device(), aligned, *map(_dtype_of, tensors))


def _remember(key: tuple[Any, ...], kernel: Any, compiled: Any, constants: dict[str, Any]) -> None:
    if compiled is None:  # a stand-in's
        return
    if len(FOUND) >= _MOST:
        FOUND.clear()
    FOUND[key] = _Found(kernel, compiled, tuple(constants[name] for name in kernel.arg_names if name in constants))


def processors_of(tensor: Tensor) -> int:
    """Multiprocessors of the GPU that a tensor is on."""
    return _processors(tensor.device)


@lru_cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
