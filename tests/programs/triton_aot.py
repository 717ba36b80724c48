"""Ahead-of-time compilation of the kernels that a call would launch, for targets that need not be present.

`python tests/programs/triton_aot.py CAPABILITY PART PARTS`: every PARTS-th case from PART.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import torch
import triton
from launch_order import Launch, faults
from ptx_order import ptx_order
from sm90_cases import fp8_in_tiles
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton_cases import empty_output, make_call, packed_input

from torch_moe_ops.backends.triton_engine import launch, plan
from torch_moe_ops.core.schemes import SCHEMES

_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
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
            signature = {name: signature_type(value) for name, value in zip(names, args, strict=False)}
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

    def order(self, compiled: Iterable[tuple[str, CompiledKernel]]) -> list[Launch]:
        """What the launches, compiled for dependent launches, do before they wait; a memory is a tensor's storage."""
        return [
            Launch(
                name,
                ptx_order(kernel.asm["ptx"]),
                [a.untyped_storage().data_ptr() if isinstance(a, torch.Tensor) else None for a in args],
            )
            for (_, args, _), (name, kernel) in zip(self.launches, compiled, strict=True)
        ]


def signature_type(value: Any) -> str:
    """What the compiler calls the type of an argument."""
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    return "i32" if isinstance(value, int) else "fp32"


def record(pdl: bool = False, packed: bool = False, tiled: bool = False, **fields: Any) -> Recorder:
    """The launches of one small call, as a GPU would get them. Nothing runs.

    pdl: with dependent launches. packed: with hidden states that come quantized. tiled: weights of `cuda_sm90_fp8`.
    """
    call = make_call(**fields)
    out = empty_output(call)
    if packed:
        call = packed_input(call)
    if tiled:
        call = fp8_in_tiles(call)
    recorder = Recorder()
    target = mock.patch.object(plan, "target_of", lambda device: {"USE_PTX": True, "PDL": pdl})
    with target, mock.patch.object(launch, "_launch", recorder):
        launch.run_experts(call, out)
    return recorder


_SIZES: dict[str, Any] = {"tokens": 6, "hidden": 256, "inter": 128}
CASES: tuple[dict[str, Any], ...] = (
    _SIZES,
    {"tokens": 200, "hidden": 256, "inter": 128, "dtype": torch.float16, "bias": True},
    {"tokens": 6, "hidden": 80, "inter": 48, "act_format": "nvfp4"},
    _SIZES | {"act_format": "nvfp4", "a1": "expert", "a2": "expert"},
    _SIZES | {"scheme": "none"},
    _SIZES | {"scheme": "mxfp4", "act_format": "mxfp8"},
    _SIZES | {"scheme": "fp8_block", "act_format": "fp8"},
    _SIZES | {"scheme": "int8", "act_format": "int8", "weights": {"group": -1}},
    _SIZES | {"scheme": "int4", "weights": {"group": 32, "zero": True}},
    *(_SIZES | {"scheme": scheme, "act_format": act} for scheme in SCHEMES for act in SCHEMES[scheme].act_formats),
    *(_SIZES | {"scheme": scheme, "dtype": torch.float16, "hidden": 160} for scheme in ("mxfp4", "mxfp8", "fp8")),
    *(_SIZES | {"scheme": scheme, "act_format": "fp8", "backend": "triton_fp8"} for scheme in ("fp8", "fp8_block")),
    *(_SIZES | {"scheme": scheme, "act_format": "fp8", "tiled": True} for scheme in ("fp8", "fp8_block")),
    _SIZES | {"scheme": "int4", "weights": {"group": 128, "zero": True, "scale_dtype": torch.float16}},
    _SIZES | {"scheme": "int4", "weights": {"group": -1}, "act_format": "fp8"},
    _SIZES | {"scheme": "int4", "weights": {"group": 128, "zero": True}, "dtype": torch.float16},
    _SIZES | {"scheme": "int8", "weights": {"group": -1}, "act_format": "int8", "tokens": 200},
    _SIZES | {"scheme": "int8", "weights": {"group": -1, "zero": True}, "act_format": "int8"},
    _SIZES | {"scheme": "int8", "weights": {"group": -1}, "act_format": "int8", "a1": 30.0, "a2": "expert"},
)


def main(capability: int, cases: tuple[dict[str, Any], ...]) -> None:
    """Compile cases for one target; print a line for each kernel: name, PTX's products, arithmetic or PTX decode."""
    for fields in cases:
        if (fields.get("backend") == "triton_fp8" or "tiled" in fields) and capability < 89:
            continue
        recorder = record(pdl=capability >= 90, **fields)
        for use_ptx in (True, False) if fields is _SIZES else (True,):
            pdl = use_ptx and capability >= 90
            compiled = list(recorder.compile(capability, use_ptx, pdl))
            assert not pdl or not (wrong := faults(recorder.order(compiled))), (fields, wrong)
            for name, kernel in compiled:
                assert kernel.asm["cubin"]
                ptx = kernel.asm["ptx"]
                assert capability >= 89 or "e4m3" not in ptx  # a type that older targets lack
                products = [p for p in ("wgmma.mma_async", "tcgen05.mma", "mma.sync") if p in ptx]
                int8 = "int8" if fields.get("weights") == {"group": -1} and fields["scheme"] == "int8" else "float"
                print(name, "ptx" if use_ptx else "arithmetic", int8, *products)


if __name__ == "__main__":
    main(int(sys.argv[1]), CASES[int(sys.argv[2]) :: int(sys.argv[3])])
