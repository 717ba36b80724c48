"""Code of the CUDA kernels, compiled for the CPU."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from paths import CPP

COMPILER = shutil.which("g++") or shutil.which("clang++")
NVCC = shutil.which("nvcc") or shutil.which(os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc"))


def host_library(source: str, folder: Path) -> ctypes.CDLL:
    """A file of tests/cpp as a shared library in `folder`; without a compiler the test is skipped."""
    if COMPILER is None:
        pytest.skip("no C++ compiler (g++ or clang++) to build the number code for the CPU")
    path, library = CPP / source, folder / "libhost.so"
    flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-shared", "-fPIC"]
    subprocess.run([COMPILER, *flags, str(path), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def host_program(source: str, folder: Path) -> Path:
    """A file of tests/cpp as a program in `folder`, of whose allocations it may have its own."""
    if COMPILER is None:
        pytest.skip("no C++ compiler (g++ or clang++) to build the program")
    path, program = CPP / source, folder / "program"
    subprocess.run([COMPILER, "-std=c++17", "-O1", "-w", "-pthread", str(path), "-o", str(program)], check=True)
    return program


def planning_library(source: str, folder: Path) -> Path:
    """The same of a .cu file: what the host does before a launch, which includes headers of CUDA."""
    if NVCC is None:
        pytest.skip("no CUDA compiler (nvcc) to build the host's code")
    path, library = CPP / source, folder / "libplan.so"
    flags = ["-std=c++17", "-O1", "-gencode", "arch=compute_90a,code=sm_90a", "-Xcompiler", "-fPIC", "-shared"]
    subprocess.run([NVCC, *flags, "-cudart", "static", str(path), "-o", str(library)], check=True, capture_output=True)
    return library


def device_program(source: str, folder: Path) -> Path:
    """A .cu file of tests/cpp as a program for a Hopper GPU."""
    if NVCC is None:
        pytest.skip("no CUDA compiler (nvcc) to build the program")
    path, program = CPP / source, folder / "program"
    flags = ["-std=c++17", "-O2", "-gencode", "arch=compute_90a,code=sm_90a", "-cudart", "static"]
    subprocess.run([NVCC, *flags, str(path), "-o", str(program)], check=True, capture_output=True)
    return program
