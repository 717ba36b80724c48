"""Number code of the CUDA kernels, compiled for the CPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

COMPILER = shutil.which("g++") or shutil.which("clang++")


def host_library(source: str, folder: Path) -> ctypes.CDLL:
    """A file of tests/cpp as a shared library in `folder`; without a compiler the test is skipped."""
    if COMPILER is None:
        pytest.skip("no C++ compiler (g++ or clang++) to build the number code for the CPU")
    path, library = Path(__file__).parent / "cpp" / source, folder / "libhost.so"
    flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-shared", "-fPIC"]
    subprocess.run([COMPILER, *flags, str(path), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))
