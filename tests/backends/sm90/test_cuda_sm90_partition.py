"""How many multiprocessors a call on the Hopper kernels takes, and whether launches may overlap with others: by the
host's code, on machines that the test plays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from host_library import planning_library

ASK = """
import ctypes, sys
print(ctypes.CDLL(sys.argv[1]).partition((ctypes.c_int * 6)(*map(int, sys.argv[2:]))))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planning_library("sm90_partition_host.cu", tmp_path_factory.mktemp("partition"))


# multiprocessors of the device, MPS, those of a green context, those of the context, a driver that knows contexts, that
# fails; then how many are taken, negative unless the launch has the whole device to itself
@pytest.mark.parametrize(
    ("machine", "want"),
    [
        ((132, 0, 0, 132, 1, 0), 132),
        ((132, 0, 64, 132, 1, 0), -64),
        ((132, 0, 132, 132, 1, 0), -132),  # two green contexts of all multiprocessors do not share a state
        ((132, 1, 0, 66, 1, 0), -66),  # a share under MPS
        ((66, 1, 0, 132, 1, 0), -66),  # where the device's count is the smaller one
        ((132, 1, 16, 66, 1, 0), -16),
        ((132, 0, 64, 132, 1, 1), -132),  # no answer: nothing is taken for granted
        ((132, 0, 0, 132, 0, 0), 132),  # a driver before CUDA 12.5
        ((132, 1, 0, 132, 0, 0), -132),
        ((1, 0, 0, 1, 1, 0), 1),
    ],
    ids=str,
)
def test_partition_of_a_stream(library: Path, machine: tuple[int, ...], want: int) -> None:
    command = [sys.executable, "-c", ASK, str(library), *map(str, machine)]  # what a driver knows is asked once
    assert int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) == want
