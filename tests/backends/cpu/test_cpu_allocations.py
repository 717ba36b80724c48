"""What calls of the C++ kernels allocate: nothing after the first one of their size."""

from __future__ import annotations

import subprocess
from pathlib import Path

from host_library import host_program


def test_later_calls_allocate_nothing(tmp_path: Path) -> None:
    program = host_program("allocations_host.cpp", tmp_path)
    first, *later = (int(word) for word in subprocess.run([program], capture_output=True, check=True).stdout.split())
    assert first > 0 and later == [0, 0, 0]
