"""Builds the extensions; everything else about the package is in pyproject.toml.

Environment: MOEQ_CUDA=1|0 builds or forbids the CUDA extension (default: where a GPU is visible),
MOEQ_ARCHS="80 120" names the GPU
architectures of the generic kernels (default: those of scripts/cuda_targets.py that nvcc knows),
MOEQ_LINEINFO=1 adds the CUDA sources' lines to the same machine code, for compute-sanitizer,
MOEQ_SANITIZE=1 adds AddressSanitizer and UndefinedBehaviorSanitizer, MOEQ_PORTABLE=1 leaves the
x86 instruction sets out. Without torch or a C++ compiler the package installs as pure Python.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import setuptools

# pyproject.toml states its license as newer releases read it; older ones fail with a message about "project.license".
MIN_SETUPTOOLS = 77
if int(setuptools.__version__.split(".")[0]) < MIN_SETUPTOOLS:
    raise SystemExit(
        f"torch_moe_ops: building needs setuptools >= {MIN_SETUPTOOLS}, got {setuptools.__version__}: "
        f"pip install --upgrade 'setuptools>={MIN_SETUPTOOLS}' wheel"
    )

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "scripts"))
import cuda_targets  # noqa: E402

# Stripped. And a toolchain that links libstdc++ statically would export it, and its streams, which make the
# error texts, would mix with those that torch has loaded: a crash.
LINK_FLAGS = ["-Wl,-s", "-Wl,--exclude-libs,ALL"]
ABI_FLAGS = ["-DTORCH_TARGET_VERSION=0x020b000000000000"]
X86_FLAGS = {
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": [
        "-mavx2",
        "-mfma",
        "-mf16c",
        "-mavx512f",
        "-mavx512bw",
        "-mavx512vl",
        "-mavx512dq",
        "-Wno-maybe-uninitialized",
        "-Wno-uninitialized",
    ],  # false alarms in GCC 12's own headers
}
X86_FLAGS["avx512bf16"] = [*X86_FLAGS["avx512"], "-mavx512bf16", "-mavx512vbmi", "-mprfchw"]
X86_FLAGS["amx"] = [*X86_FLAGS["avx512bf16"], "-mavx512fp16", "-mamx-tile", "-mamx-bf16"]
X86_FLAGS["amx_emulated"] = X86_FLAGS["avx2"]
X86_FLAGS |= {f"integers_{isa}": X86_FLAGS[isa] for isa in ("avx2", "avx512")}
X86_FLAGS["integers_avxvnni"] = [*X86_FLAGS["avx2"], "-mavxvnni"]
X86_FLAGS["integers_avx512vnni"] = [*X86_FLAGS["avx512"], "-mavx512vnni"]
X86_FLAGS["integers_amx"] = X86_FLAGS["integers_avx512vnni"]
X86_FLAGS["integers_amx_emulated"] = X86_FLAGS["avx2"]


def sanitizing() -> bool:
    return os.environ.get("MOEQ_SANITIZE") == "1"


def host_flags() -> list[str]:
    # No contraction: the quantizers are defined operation by operation.
    flags = ["-O3", "-g0", "-std=c++17", "-ffp-contract=off", "-fwrapv", "-fvisibility=hidden", "-Wall", "-Wno-psabi"]
    if sanitizing():
        flags += ["-O1", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
        flags += ["--param", "asan-stack=0"]  # else GCC needs minutes for the kernels' arrays of registers
    return [*flags, *ABI_FLAGS]


def isa_flags(isa: str) -> list[str]:
    # The portable file runs the same templates under both sanitizers; with undefined, AVX-512 compiles for minutes, and
    # emulated tiles with -O3 do, too.
    level = "-O2" if isa == "amx_emulated" else "-O3"
    return [*X86_FLAGS[isa], *([level, "-fno-sanitize=undefined"] if sanitizing() else [])]


def link_flags() -> list[str]:
    return ["-fsanitize=address,undefined"] if sanitizing() else LINK_FLAGS


def is_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64") and os.environ.get("MOEQ_PORTABLE") != "1"


# What not every compiler and assembler knows that C++17 needs, and what its files are written in.
TRIED = {
    "amx": b'#include <immintrin.h>\n__m512h f(__m512h x) { __asm__ volatile("tilerelease"); return x; }\n',
    "integers_avxvnni": b"#include <immintrin.h>\n__m256i f(__m256i x) { return _mm256_dpbusd_avx_epi32(x, x, x); }\n",
}


@functools.cache
def compiles(isa: str) -> bool:
    """Whether this instruction set can be compiled: AMX by GCC 12 and Clang 16, AVX-VNNI by GCC 11 and Clang 12."""
    if isa == "integers_amx":
        return compiles("amx")  # one definition tells of both
    if isa not in TRIED:
        return True
    command = [*os.environ.get("CXX", "c++").split(), *X86_FLAGS[isa], "-x", "c++", "-c", "-o", os.devnull, "-"]
    return subprocess.run(command, input=TRIED[isa], capture_output=True, check=False).returncode == 0


def isas() -> list[str]:
    """The instruction sets that have a file of their own, besides the portable one."""
    if not is_x86():
        return []
    return [isa for isa in X86_FLAGS if compiles(isa)]


def sources(folder: str, pattern: str) -> list[str]:
    # Backwards, so that what takes longest, csrc/cuda/sm90/w4a8, is not the last to begin.
    return sorted((str(path.relative_to(ROOT)) for path in (ROOT / "csrc" / folder).glob(pattern)), reverse=True)


def wants_cuda(torch: Any) -> bool:
    """MOEQ_CUDA decides; without it, a GPU that torch sees and sources to compile."""
    choice = os.environ.get("MOEQ_CUDA", "")
    if choice not in ("", "0", "1"):
        raise SystemExit(f"MOEQ_CUDA must be 0 or 1, got {choice!r}")
    return choice == "1" or (choice == "" and torch.cuda.is_available() and bool(sources("cuda", "*.cu")))


def cpu_extension(cpp: Any) -> Any:
    defines = ["-DMOEQ_X86"] if isas() else []
    defines += [f"-DMOEQ_{isa.removeprefix('integers_').upper()}" for isa in TRIED if isa in isas()]
    files = [
        "csrc/ops.cpp",
        *(f for f in sources("cpu", "*.cpp") if "isa_" not in f),
        *sources("cpu", "isa_*portable.cpp"),
    ]
    return cpp.CppExtension(
        "torch_moe_ops._C",
        files,
        extra_compile_args={"cxx": [*host_flags(), *defines]},
        extra_link_args=link_flags(),
        py_limited_api=True,
    )


def nvcc_of(cpp: Any) -> str:
    """The compiler that torch's BuildExtension will call."""
    home = Path(cpp.CUDA_HOME or "/usr/local/cuda")
    return os.environ.get("PYTORCH_NVCC") or str(home / "bin" / "nvcc")


def arches(cpp: Any) -> list[str]:
    """The targets of MOEQ_ARCHS (else all) that nvcc knows."""
    asked = tuple(os.environ.get("MOEQ_ARCHS", "").split()) or cuda_targets.ARCHES
    known, missing = cuda_targets.split(asked, cuda_targets.known_numbers(nvcc_of(cpp)))
    if missing:
        print(f"torch_moe_ops: {cuda_targets.left_out(nvcc_of(cpp), missing)}")
    return known


def cuda_flags(targets: list[str]) -> list[str]:
    lines = ["-lineinfo"] if os.environ.get("MOEQ_LINEINFO") == "1" else []
    return ["-O3", "-std=c++17", "--fmad=false", *lines, *targets, *ABI_FLAGS, "-DUSE_CUDA"]


def cuda_extension(cpp: Any) -> Any:
    return cpp.CUDAExtension(
        "torch_moe_ops._C_cuda",
        [
            *(file for folder in ("cuda", "cuda/sm90/ops") for file in sources(folder, "*.cpp")),
            *(file for folder in ("cuda", "cuda/expert_parallel") for file in sources(folder, "*.cu")),
        ],
        extra_compile_args={
            "cxx": [*host_flags(), "-DUSE_CUDA"],
            "nvcc": cuda_flags(cuda_targets.flags(arches(cpp), generic=True)),
        },
        extra_link_args=LINK_FLAGS,
        py_limited_api=True,
    )


def build_command(cpp: Any) -> Any:
    class Build(cpp.BuildExtension):  # type: ignore[misc]
        """Compiles what needs flags of its own: each instruction set's file, and the kernels for Hopper alone."""

        def build_extension(self, ext: Any) -> None:
            if ext.name.endswith("._C"):
                ext.extra_objects = self.compile_isas(ext)
            if ext.name.endswith("._C_cuda"):
                flags = {**ext.extra_compile_args, "nvcc": cuda_flags(cuda_targets.flags([cuda_targets.HOPPER], False))}
                ext.extra_objects = self.compile_with(ext, "sm90", sources("cuda/sm90", "*/*.cu"), flags)
            super().build_extension(ext)

        def compile_isas(self, ext: Any) -> list[str]:
            # A file has flags of its own, so ninja is started for each: side by side, or all cores but one would rest.
            # Without ninja torch changes the compiler's fields while it compiles: one after another.
            workers = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1) if self.use_ninja else 1
            with concurrent.futures.ThreadPoolExecutor(workers) as pool:
                made = pool.map(functools.partial(self.compile_isa, ext), isas())
                return [name for names in made for name in names]

        def compile_isa(self, ext: Any, isa: str) -> list[str]:
            flags = {"cxx": [*ext.extra_compile_args["cxx"], *isa_flags(isa)]}
            return self.compile_with(ext, isa, [f"csrc/cpu/isa_{isa}.cpp"], flags)

        def compile_with(self, ext: Any, folder: str, files: list[str], flags: dict[str, list[str]]) -> list[str]:
            objects: list[str] = self.compiler.compile(
                files,
                output_dir=str(Path(self.build_temp) / folder),  # ninja keeps one file of rules a folder
                include_dirs=ext.include_dirs,
                extra_postargs=flags,
                depends=ext.depends,
            )
            return objects

    return Build.with_options(use_ninja=shutil.which("ninja") is not None)


def build_arguments() -> dict[str, Any]:
    """Arguments of setup(), or none where nothing can be compiled (with the reason printed)."""
    try:
        import torch
        from torch.utils import cpp_extension as cpp
    except ImportError as error:
        print(f"torch_moe_ops: installing without compiled kernels: {error}")
        return {}
    if shutil.which(os.environ.get("CXX", "c++").split()[0]) is None:
        print("torch_moe_ops: installing without compiled kernels: no C++ compiler found (CXX)")
        return {}
    extensions = [cpu_extension(cpp)]
    if wants_cuda(torch):
        extensions.append(cuda_extension(cpp))
    return {
        "ext_modules": extensions,
        "cmdclass": {"build_ext": build_command(cpp)},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


setuptools.setup(**build_arguments())
