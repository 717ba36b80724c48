"""Every kernel compiles for every target, on a machine that has none of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

# What the tensor cores of each target are fed with.
PRODUCTS = {80: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}


@pytest.mark.parametrize(
    ("capability", "cases"),
    [(c, "few") if c in (80, 90) else pytest.param(c, "all", marks=pytest.mark.slow) for c in PRODUCTS]
    + [pytest.param(c, "all", marks=pytest.mark.slow) for c in (80, 90)],
)
def test_compiles(capability: int, cases: str, tmp_path: Path) -> None:
    # Another process: where this one has no GPU, its kernels are for Triton's interpreter.
    script = Path(__file__).with_name("triton_aot.py")
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(script), str(capability), cases]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    kernels = {"prologue_kernel", "gemm1_kernel", "requantize_kernel", "gemm2_kernel", "combine_kernel"}
    assert {line[0] for line in lines} == kernels
    for name, how, kind, *products in lines:
        if how == "ptx" and name.startswith("gemm"):
            # Blackwell's newest instructions have no product of int8 in Triton.
            expected = "mma.sync" if kind == "int8" and capability == 100 else PRODUCTS[capability]
            assert expected in products, (name, kind, products)
