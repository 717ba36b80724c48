"""The package where Triton is not installed, as on most CPUs: imported, asked and run, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch_moe_ops

SUPPORT = Path(__file__).resolve().parents[1] / "support"

PROGRAM = """
import importlib, pkgutil, sys
sys.modules["triton"] = None  # whatever imports it gets a ModuleNotFoundError
import torch
import torch_moe_ops as moe
from problems import Case, make_raw

for package in [m for m in pkgutil.iter_modules(moe.__path__, "torch_moe_ops.") if m.ispkg]:
    importlib.import_module(package.name)
for scheme in ("none", "nvfp4", "mxfp4", "fp8", "int4"):
    problem = moe.Problem(scheme, device="cuda", capability=(9, 0), num_experts=4, hidden_size=64, intermediate_size=64)
    assert "triton" in moe.explain(problem).against

w = moe.prepare(make_raw(Case()))
ids, weights = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1)
assert moe.fused_moe_routed(torch.randn(2, 64), ids, weights, w).isfinite().all()
print(w.backend)
"""


def test_nothing_but_the_triton_backend_needs_triton() -> None:
    # The package that these tests run: it may be installed beside this tree, which then has no compiled kernels.
    path = os.pathsep.join([str(SUPPORT), str(Path(torch_moe_ops.__path__[0]).parent)])
    env = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", PROGRAM]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, cwd=SUPPORT)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["cpu"]
