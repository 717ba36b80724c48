"""Names of C++ parameters, from the launcher sources that the flashinfer wheel ships."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

LAUNCHER = "data/csrc/trtllm_fused_moe_kernel_launcher.cu"
CUTLASS = "data/csrc/fused_moe/cutlass_backend/flashinfer_cutlass_fused_moe_binding.cu"
ENVIRONMENT = "data/csrc/nv_internal/cpp/common/envUtils.cpp"


@cache
def source(path: str) -> str:
    import flashinfer

    return (Path(flashinfer.__file__).parent / path).read_text()


def split_parameters(text: str) -> list[str]:
    """The names in a C++ parameter list; commas inside <> do not separate."""
    names, depth, current = [], 0, ""
    for char in re.sub(r"\s+", " ", text) + ",":
        depth += (char == "<") - (char == ">")
        if char == "," and depth == 0:
            names.append(current.split("=")[0].split()[-1].lstrip("&*"))
            current = ""
        else:
            current += char
    return names


@cache
def parameters(op: str) -> tuple[str, ...]:
    """Of a TRTLLM function."""
    found = re.search(rf"^Array<(?:Tensor|Optional<Tensor>)> {op}\((.*?)\) \{{", source(LAUNCHER), re.S | re.M)
    assert found is not None, f"{op} is not in {LAUNCHER}"
    return tuple(split_parameters(found.group(1)))


@cache
def method_parameters(method: str) -> tuple[str, ...]:
    """Of a method of the CUTLASS binding's runner."""
    found = re.search(rf"^  \w[\w:<>]* {method}\((.*?)\)\s*(?:override\s*)?\{{", source(CUTLASS), re.S | re.M)
    assert found is not None, f"{method} is not in {CUTLASS}"
    return tuple(split_parameters(found.group(1)))
