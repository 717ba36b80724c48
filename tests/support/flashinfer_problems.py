"""Problems for the FlashInfer backends, and fixtures that say which release is there."""

from __future__ import annotations

import pytest

import torch_moe_ops as moe
from torch_moe_ops.backends.flashinfer import package

TRTLLM, CUTLASS = "flashinfer_trtllm", "flashinfer_cutlass"
NVFP4 = moe.Problem(
    "nvfp4",
    act_format="nvfp4",
    device="cuda",
    capability=(10, 0),
    num_experts=128,
    hidden_size=2880,
    intermediate_size=704,
    input_scale="tensor",
)


def against(problem: moe.Problem, backend: str = TRTLLM) -> str:
    return "; ".join(moe.explain(problem).against[backend])


@pytest.fixture(name="version")
def _version(monkeypatch: pytest.MonkeyPatch) -> object:
    """Pretend that some release is installed."""
    monkeypatch.setattr(package, "import_error", lambda: None)
    return lambda text: monkeypatch.setattr(package, "installed_version", lambda: text)


@pytest.fixture(name="installed")
def _installed() -> str:
    pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    return str(package.installed_version())
