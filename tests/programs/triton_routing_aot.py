"""Ahead-of-time compilation of the routing kernel: `python tests/programs/triton_routing_aot.py CAPABILITY`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from torch_moe_ops.backends.triton_engine import routing_launch
from torch_moe_ops.backends.triton_engine.routing import route_kernel

_POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32"}
_OPTIONS = ("num_warps", "launch_pdl", "enable_reflect_ftz", "enable_fp_fusion")

# dtype, experts, bias, then the arguments of moeq::route, shared experts with weights
Case = tuple[torch.dtype, int, bool, tuple[Any, ...], int]
CASES: tuple[Case, ...] = (
    (torch.float32, 256, True, ("deepseek_v3", 8, 8, 4, 2.5), 0),
    (torch.bfloat16, 128, False, ("renormalize", 8), 0),
    (torch.float16, 160, False, ("default", 6, 8, 3, 16.0), 0),
    (torch.bfloat16, 512, True, ("deepseek_v4", 22), 0),
    (torch.float32, 2048, False, ("topk_sigmoid", 32), 0),
    (torch.bfloat16, 512, False, ("renormalize", 10), 3),
)


def compile_case(case: Case, capability: int) -> CompiledKernel:
    """What one call would launch on a device of that compute capability (90 for 9.0). Nothing runs."""
    dtype, experts, with_bias, options, shared = case
    launched: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    target = {"USE_PTX": True, "PDL": capability >= 90}
    with (
        mock.patch.object(routing_launch, "_launch", lambda grid, *args, **kw: launched.append((args, kw))),
        mock.patch.object(routing_launch, "target_of", lambda device: target),
    ):
        routing_launch.route_triton(
            torch.zeros(3, experts, dtype=dtype),
            torch.zeros(experts) if with_bias else None,
            *options,
            shared=(shared, torch.zeros(3, shared, dtype=dtype) if shared else None),
        )
    ((args, constants),) = launched
    names = route_kernel.arg_names
    signature, values = {}, {name: v for name, v in constants.items() if name not in _OPTIONS}
    for name, value in zip(names, args, strict=False):
        if isinstance(value, torch.Tensor):
            signature[name] = _POINTERS[value.dtype]
        elif name == "column_stride" and value == 1:
            values[name] = 1  # the launcher's own specialization
        else:
            signature[name] = "i32" if isinstance(value, int) else "fp32"
    signature |= dict.fromkeys(values, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    options_given = {name: constants[name] for name in _OPTIONS if name in constants}
    source = ASTSource(route_kernel, signature, values, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options_given)


def main(capability: int) -> None:
    """Compile every case; print a line for each: method, size of the binary, warp-wide reductions, spilled bytes."""
    for case in CASES:
        kernel = compile_case(case, capability)
        ptx = kernel.asm["ptx"]
        print(case[3][0], len(kernel.asm["cubin"]), ptx.count("redux.sync"), ptx.count("shfl.sync"))


if __name__ == "__main__":
    main(int(sys.argv[1]))
