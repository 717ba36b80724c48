"""Builds the part of FlashInfer's CUTLASS MoE module for Hopper that bf16, f16, FP8 and FP8-block layers call.

    python scripts/flashinfer_sm90_subset.py FOLDER [--install] [--mxfp4]

Of about 250 sources it compiles 22: the binding, the dispatch of four pairs of types, the kernels of three tiles
each, and their common helpers. Every function that is missing then becomes one that throws; the runner takes a
tile whose launcher throws for one that it does not have, and pairs of types that were left out raise at the call.
--mxfp4 builds what layers with MXFP4 weights call, and nothing else (scripts/flashinfer_sm90_mxfp4.py).

FOLDER/fused_moe_90.so is the result. --install puts it where the installed flashinfer looks for modules that were
made ahead of time (flashinfer/data/aot/fused_moe_90/), so that nothing is compiled at run time.
scripts/flashinfer_build_sm90.sh says what the machine must have.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import flashinfer_sm90_mxfp4 as mxfp4

# Rows and columns of the output tile; the first one is what the runner takes where nothing was tuned.
TILES = ((128, 16), (128, 64), (128, 128))
BF16, F16, FP8 = "__nv_bfloat16", "half", "__nv_fp8_e4m3"
K_BYTES = 128
RUNNERS = (f"{BF16}, {BF16}", f"{F16}, {F16}", f"{FP8}, {FP8}, {BF16}", f"{BF16}, {FP8}, {BF16}")
DISPATCH = tuple(f"moe_gemm_kernels_{pair}.cu" for pair in ("bf16_bf16", "fp16_fp16", "fp8_fp8", "bf16_fp8"))
NAMESPACE = "tensorrt_llm::kernels::cutlass_kernels"

MISSING = """
#include <string>
#include "tensorrt_llm/common/tllmException.h"
extern "C" void moe_subset_missing(char const* what) {
  std::string const text = std::string("not in this subset of the module: ") + what;
  throw tensorrt_llm::common::TllmException(__FILE__, __LINE__, text.c_str());
}
"""


def kernels(dtype: str, out: str, size: int) -> str:
    """One source with the grouped GEMMs of a type, with and without exchanged operands. size: of dtype, in bytes."""
    lines = ['#include "tensorrt_llm/kernels/cutlass_kernels/moe_gemm/launchers/moe_gemm_tma_ws_launcher.inl"']
    lines.append(f"namespace {NAMESPACE}_oss {{")
    for rows, cols in TILES:
        for swapped in ("false", "true"):
            types = f"Sm90, {dtype}, {dtype}, {out}, void, EpilogueOpDefault, NONE"
            tile = f"{rows}, {cols}, {K_BYTES // size}, 1, 1, 1"
            lines.append(f"INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM({types}, {tile}, false, false, false, {swapped});")
    return "\n".join([*lines, "}", ""])


def runners() -> str:
    """The source with the runners of the pairs of types."""
    lines = ['#include "fused_moe/cutlass_backend/cutlass_fused_moe_kernels.cuh"', '#include "moe_kernels.h"']
    lines.append(f"namespace {NAMESPACE} {{")
    lines += [f"template class CutlassMoeFCRunner<{types}>;" for types in RUNNERS]
    lines += [f"INSTANTIATE_FINALIZE_MOE_ROUTING({dtype}, {dtype}, {dtype});" for dtype in (BF16, F16)]
    return "\n".join([*lines, "}", ""])


def is_kept(source: Path) -> bool:
    """Of FlashInfer's own sources, those that are compiled as they are."""
    generated = source.name.endswith(".generated.cu")
    replaced = source.name == "cutlass_fused_moe_instantiation.cu"
    left_out = source.name.startswith("moe_gemm_kernels_") and source.name not in DISPATCH
    return not (generated or replaced or left_out)


def stubs(library: Path) -> str:
    """A source that defines every function of FlashInfer's own that a library lacks."""
    listed = subprocess.run(["nm", "-D", "-u", library], check=True, capture_output=True, text=True).stdout
    names = sorted({line.split()[-1].split("@")[0] for line in listed.splitlines()})
    lines = [MISSING]
    for number, name in enumerate(n for n in names if "tensorrt_llm" in n):
        body = f"lea .Lname{number}(%rip), %rdi\\n jmp moe_subset_missing@PLT"
        text = f'.section .rodata\\n.Lname{number}: .string \\"{name}\\"\\n.text'
        lines.append(f'__asm__(".text\\n.globl {name}\\n.type {name},@function\\n{name}:\\n {body}\\n{text}\\n");')
    return "\n".join([*lines, ""])


def sources_of(spec: Any, folder: Path, only_mxfp4: bool) -> list[Path]:
    """FlashInfer's sources that are kept, then those that are written into the folder."""
    if only_mxfp4:
        kept, written = mxfp4.is_kept, mxfp4.sources()
    else:
        kept, written = is_kept, {"runners.cu": runners(), "kernels_fp8.cu": kernels(FP8, BF16, 1)}
        written |= {"kernels_bf16.cu": kernels(BF16, BF16, 2), "kernels_f16.cu": kernels(F16, F16, 2)}
    sources = [s for s in map(Path, spec.sources) if kept(s)]
    for name, text in written.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:  # what has not changed is not compiled again
            path.write_text(text)
        sources.append(path)
    return sources


def build(spec: Any, folder: Path, only_mxfp4: bool = False) -> Path:
    """Compile, find out what is missing, add it."""
    sources = sources_of(spec, folder, only_mxfp4)
    spec.sources = sources
    spec.build(verbose=True)
    (folder / "missing.cpp").write_text(stubs(spec.jit_library_path))
    spec.sources = [*sources, folder / "missing.cpp"]
    spec.build(verbose=True)
    made = folder / "fused_moe_90.so"
    shutil.copy(spec.jit_library_path, made)
    subprocess.run(["strip", made], check=True)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--mxfp4", action="store_true", help="build the part of MXFP4 weights, and nothing else")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    # Read when flashinfer is imported.
    os.environ |= {"FLASHINFER_WORKSPACE_BASE": str(folder), "FLASHINFER_CUDA_ARCH_LIST": "9.0a"}
    from flashinfer.jit import env
    from flashinfer.jit.fused_moe import gen_cutlass_fused_moe_sm90_module

    began = time.time()
    made = build(gen_cutlass_fused_moe_sm90_module(), folder, options.mxfp4)
    print(f"{made}: {made.stat().st_size / 2**20:.1f} MiB after {time.time() - began:.0f} s")
    if options.install:
        target = env.FLASHINFER_AOT_DIR / "fused_moe_90"
        target.mkdir(parents=True, exist_ok=True)
        print(shutil.copy(made, target))


if __name__ == "__main__":
    main()
