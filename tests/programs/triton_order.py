"""What the Triton kernels of calls do before they wait: `python tests/programs/triton_order.py PART PARTS`.

For every PARTS-th case from PART a line: its name, how many kernels read early, and the kernels; then the faults.
Compiled for SM90 as far as PTX, which is kept nowhere: there is no binary.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import torch
import triton
from launch_order import Launch, faults
from ptx_order import ptx_order
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton_aot import record
from triton_routing_aot import CASES as ROUTING_CASES
from triton_routing_aot import compile_case

from torch_moe_ops.core.schemes import SCHEMES
from torch_moe_ops.transports.kernels import place_kernel

CAPABILITY = 90
_ONE: dict[str, Any] = {"tokens": 1, "hidden": 256, "inter": 128}
_FEW: dict[str, Any] = _ONE | {"tokens": 6}
_WHOLE_ROWS: dict[str, Any] = {"weights": {"group": -1}}  # int8 weights that are multiplied as they are


def _cases() -> Iterator[dict[str, Any]]:
    """One token and few, many where that is other code; hidden states as values and as codes; scales from anywhere."""
    for scheme in sorted(SCHEMES, key=lambda name: name != "none"):
        for act in SCHEMES[scheme].act_formats:
            fields = {"scheme": scheme, "act_format": act} | (_WHOLE_ROWS if scheme == "int8" else {})
            yield _ONE | fields
            yield _FEW | fields
            if act != "none":
                yield _ONE | fields | {"packed": True} | ({"a1": 500.0, "a2": 300.0} if act == "nvfp4" else {})
    for tokens in (1, 6, 300):
        yield _ONE | {"tokens": tokens, "act_format": "nvfp4", "a1": "expert", "a2": "expert", "bias": True}
        yield _ONE | {"tokens": tokens, "scheme": "none", "bias": True, "router_weight_on_input": True, "top_k": 1}
        for scheme in ("fp8", "fp8_block"):
            yield _ONE | {"tokens": tokens, "scheme": scheme, "act_format": "fp8", "backend": "triton_fp8"}
            yield _ONE | {"tokens": tokens, "scheme": scheme, "act_format": "fp8", "tiled": True}
    yield _ONE | {"tokens": 300}
    yield _ONE | {"scheme": "none", "dtype": torch.float16, "foreign": True}


CASES = tuple(_cases())


def check(fields: dict[str, Any]) -> None:
    recorder = record(pdl=True, **fields)
    launches = recorder.order(recorder.compile(CAPABILITY, pdl=True))
    early = sum(1 for launch in launches if any(launch.order.of("load")))
    named = "-".join(str(value) for value in fields.values()).replace(" ", "")
    print(named, early, *(launch.name for launch in launches))
    for fault in faults(launches):
        print("FAULT", named, fault)


def check_routing() -> None:
    for case in ROUTING_CASES:
        order = ptx_order(compile_case(case, CAPABILITY).asm["ptx"])
        print(case[3][0], sum(1 for _ in order.of("load")), "route_kernel")
        for fault in faults([Launch("route_kernel", order, ())]):
            print("FAULT", case[3][0], fault)


def check_places() -> None:
    """The kernel in front of an exchange between ranks, which no layer's call launches."""
    for ids in ("*i32", "*i64"):
        pointers = {
            "first_ptr": "*i32",
            "count_ptr": "*i32",
            "slots_ptr": "*i32",
            "load_ptr": "*i64",
            "places_ptr": "*i32",
        }
        numbers = dict.fromkeys(("pairs", "experts", "slots", "rank"), "i32")
        constants = {"TOP_K": 8, "BLOCK": 256, "PDL": True}
        signature = {"ids_ptr": ids} | pointers | numbers | dict.fromkeys(constants, "constexpr")
        source = ASTSource(place_kernel, signature, constants)
        order = ptx_order(triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32)).asm["ptx"])
        print(ids, sum(1 for _ in order.of("load")), "place_kernel")
        for fault in faults([Launch("place_kernel", order, ())]):
            print("FAULT", ids, fault)


def main(part: int, parts: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        with mock.patch.object(CUDABackend, "make_cubin", lambda *args, **keywords: b""):
            for fields in CASES[part::parts]:
                check(fields)
            if part == 0:
                check_routing()
                check_places()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
