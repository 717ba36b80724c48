"""A GPU that is not there: what the host does for passes of Triton's kernels on Hopper, with tensors of the host.

Triton's own look-up of a launch and its launching function run, down to where C code asks tensors for their addresses;
nothing is compiled, and no kernel runs. Ops of the CUDA extension are empty functions behind torch's dispatcher.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from torch_moe_ops.backends import cuda_sm90
from torch_moe_ops.backends.triton_engine import (
    backward_launch,
    dequantize_tiles,
    few,
    grouped,
    known,
    rank_sums,
    ranks,
)
from torch_moe_ops.core import device_code, devices
from torch_moe_ops.tuning import tuned

_PROPERTIES = SimpleNamespace(multi_processor_count=132, major=9, minor=0)
_TARGET = GPUTarget("cuda", 90, 32)
_BEFORE_ARGUMENTS = 13  # of Triton's C code: a kernel's own are behind them, or a tuple
_OPS = ("experts_sm90", "experts_sm90_rows")
_SCHEMAS = Path(__file__).resolve().parent.parent / "csrc" / "generated" / "calls.h"
_KEPT = "experts_sm90_rows_kept(int tokens, int top_k, int experts, int hidden, int inter) -> int"


class Counts:
    """launches: how often each kernel, or op of the CUDA extension, ran; looked_up: which of them Triton looked up."""

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()
        self.looked_up: Counter[str] = Counter()

    def clear(self) -> None:
        self.launches.clear()
        self.looked_up.clear()


class _Launcher(CudaLauncher):
    """Triton's launching function of a kernel, but for the C code behind it, which wants the addresses of tensors."""

    global_scratch_size = profile_scratch_size = launch_cooperative_grid = launch_pdl = 0
    global_scratch_align = profile_scratch_align = num_ctas = 1
    gsan_enabled, arg_annotations, kernel_signature = False, b"", b""

    def __init__(self, name: str, launches: Counter[str]) -> None:
        self.launch, self.name, self.launches, self.tensors = self._launch, name, launches, -1

    def _launch(self, *args: Any) -> None:
        given = args[-1] if isinstance(args[-1], tuple) else args[_BEFORE_ARGUMENTS:]
        if isinstance(given[0], Tensor):  # or its address is there
            if self.tensors < 0:
                self.tensors = sum(isinstance(value, Tensor) for value in given)  # which come first
            deque(map(Tensor.data_ptr, given[: self.tensors]), maxlen=0)
        self.launches[self.name] += 1


class _Kernel(CompiledKernel):
    """A compiled kernel without code."""

    def __init__(self, name: str, launches: Counter[str]) -> None:
        self.module = self.function = 1
        self.packed_metadata, self.name, self.src = (), name, None
        self._run = _Launcher(name, launches)

    def __del__(self) -> None:  # nothing is loaded
        pass


class _Driver:
    """What a launch asks Triton's driver."""

    def __init__(self) -> None:
        self.get_current_device = torch.cuda.current_device
        self.get_current_stream = int  # in C, as is torch's

    def get_current_target(self) -> GPUTarget:
        return _TARGET


def _of_cuda() -> dict[str, Any]:
    """By name what torch.cuda's functions end in, which a build without CUDA lacks."""
    return {
        "_lazy_init": lambda: None,
        "_get_device_index": lambda device, *args, **kwargs: 0,
        "_get_device_properties": lambda index: _PROPERTIES,
        "_exchange_device": lambda index: 0,
        "_maybe_exchange_device": lambda index: 0,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "is_current_stream_capturing": lambda: False,
    }


def _of_triton(counts: Counts, touched: set[JITFunction[Any]]) -> dict[str, Callable[..., Any]]:
    """By name methods of JITFunction: a look-up that counts, and what compiles."""
    run = JITFunction.run

    def look_up(self: JITFunction[Any], *args: Any, **options: Any) -> Any:
        counts.looked_up[self.fn.__name__] += 1
        return run(self, *args, **options)

    def compiled(self: JITFunction[Any], key: str, signature: Any, device: int, *args: Any) -> _Kernel:
        kernel = self.device_caches[device][0][key] = _Kernel(self.fn.__name__, counts.launches)
        touched.add(self)
        return kernel

    return {"run": look_up, "_do_compile": compiled}


def _define_ops(launches: Counter[str]) -> torch.library.Library:
    """The CUDA extension's ops, with its own schemas, for tensors of the host."""
    library, text = torch.library.Library("moeq_C", "FRAGMENT"), _SCHEMAS.read_text()

    def counted(op: str) -> Callable[..., None]:
        def run(*args: Any) -> None:
            launches[op] += 1

        return run

    for op in _OPS:
        if not hasattr(torch.ops.moeq_C, op):
            found = re.search(rf'"{op}\((?:[^"]|"\s*")*"', text)
            assert found is not None
            library.define(re.sub(r'"\s*"', "", found.group()).strip('"'))
        library.impl(op, counted(op), "CPU")
    if not hasattr(torch.ops.moeq_C, "experts_sm90_rows_kept"):
        library.define(_KEPT)
        library.impl("experts_sm90_rows_kept", lambda *sizes: 1024, "CompositeExplicitAutograd")
    return library


def _target_of(device: torch.device) -> dict[str, bool]:
    return {"USE_PTX": True, "PDL": True}


@contextmanager
def host_gpu() -> Iterator[Counts]:
    """In which tensors of the host say that they are a Hopper GPU's (their device does not)."""
    counts, touched = Counts(), set[JITFunction[Any]]()
    library = _define_ops(counts.launches)
    with ExitStack() as stack:

        def put(target: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(target, name, value, create=True))

        put(Tensor, "is_cuda", True)
        for name, function in _of_cuda().items():
            put(torch.cuda, name, function)
        for name, function in _of_triton(counts, touched).items():
            put(JITFunction, name, function)
        put(triton.runtime.driver, "_active", _Driver())
        put(devices, "_facts", lambda index: ((9, 0), _PROPERTIES.multi_processor_count))
        stack.enter_context(mock.patch.dict(known.FOUND, clear=True))
        for module in (backward_launch, dequantize_tiles, few, grouped, rank_sums, ranks):
            put(module, "target_of", _target_of)
        put(cuda_sm90, "runs_on", lambda device: True)
        stack.enter_context(mock.patch("torch_moe_ops.backends.triton.runs_on", lambda device: True))
        put(device_code, "missing_on", lambda device, suffix: None)
        put(tuned, "name_of_device", lambda index: "NVIDIA H200")
        try:
            yield counts
        finally:
            for kernel in touched:
                kernel.device_caches.clear()
            library._destroy()
