"""Ahead-of-time compilation of the kernels that a call would launch, for targets that need not be present."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}
_OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")


class Recorder:
    """Stands in for the launcher: keeps what would be launched, and compiles it on demand."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, kernel: Any, grid: tuple[int, ...], plan: Any, *args: Any, **constants: Any) -> None:
        self.launches.append((kernel, args, constants))

    def compile(self, capability: int, use_ptx: bool = True, pdl: bool = False) -> Iterator[tuple[str, CompiledKernel]]:
        """(kernel name, compiled kernel) of every launch, for compute capability `capability` (90 for 9.0)."""
        for kernel, args, constants in self.launches:
            names = kernel.arg_names
            signature = {name: _type(value) for name, value in zip(names, args, strict=False)}
            options = {name: constants[name] for name in _OPTIONS if name in constants}
            values = {name: v for name, v in constants.items() if name not in _OPTIONS}
            values |= {"USE_PTX": use_ptx, "PDL": pdl}
            values = {name: v for name, v in values.items() if name in names}
            signature |= dict.fromkeys(values, "constexpr")
            aligned = {
                (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")
            }
            source = ASTSource(kernel, signature, values, aligned)
            yield kernel.fn.__name__, triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    return "i32" if isinstance(value, int) else "fp32"
