"""Programs that compile Triton's kernels for a GPU that need not be there, each a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from paths import PROGRAMS

# Those of a layer.
KERNELS = {"prologue_kernel", "gemm1_kernel", "requantize_kernel", "gemm2_kernel", "combine_kernel"}
# Those of a backward pass.
BACKWARD_KERNELS = {
    "grouped_kernel",
    "hidden_kernel",
    "weights_kernel",
    "few_kernel",
    "low_kernel",
    "outer_kernel",
    "bias_kernel",
    "gather_sum_kernel",
    "slots_kernel",
    "count_slots_kernel",
    "start_slots_kernel",
    "place_slots_kernel",
    "dequantize_kernel",
    "dequantize_tiles_kernel",
    "dequantize_bytes_kernel",
}
# Those besides, of few ranks, on a GPU whose shared memory holds their tiles.
LARGE_SHARED_KERNELS = {"low_and_sums_kernel", "add_parts_kernel"}


def words_of(program: str, cache: Path, *arguments: object) -> list[list[str]]:
    """What a program prints, a list of words a line. A process of its own: here kernels may be for Triton's interpreter."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, str(PROGRAMS / program), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [line.split() for line in done.stdout.splitlines()]
