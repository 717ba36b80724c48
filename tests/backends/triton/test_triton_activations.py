"""Activations of the Triton engine, value by value, against their formulas in float64."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton_cases import DEVICE

from torch_moe_ops.backends.triton_engine.activations import activate_gated
from torch_moe_ops.core.activations import apply_activation

pytestmark = [
    pytest.mark.skipif(
        DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or TRITON_INTERPRET=1"
    ),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),  # numpy, of infinity - infinity
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),
]
VALUES = 4096


@triton.jit
def activate_kernel(gate_ptr, up_ptr, out_ptr, alpha, beta, limit, NAME: tl.constexpr, VALUES: tl.constexpr):
    at = tl.arange(0, VALUES)
    h = activate_gated(tl.load(gate_ptr + at), tl.load(up_ptr + at), alpha, beta, limit, NAME, False)
    tl.store(out_ptr + at, h)


def activate(name: str, gate: torch.Tensor, up: torch.Tensor, alpha: float, beta: float) -> torch.Tensor:
    out = torch.empty(VALUES, device=DEVICE)
    activate_kernel[(1,)](gate.to(DEVICE), up.to(DEVICE), out, alpha, beta, float("inf"), name, VALUES)
    return out.cpu()


def sizes(smallest: float, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Gates and ups of both signs whose magnitudes are spread evenly over the exponents."""
    g = torch.Generator().manual_seed(5)
    exponents = torch.tensor([smallest, largest]).log2()
    magnitudes = torch.exp2(torch.rand((2, VALUES), generator=g) * exponents.diff() + exponents[0])
    gate, up = magnitudes * (torch.randint(0, 2, (2, VALUES), generator=g) * 2 - 1)
    return gate, up


@pytest.mark.parametrize(("alpha", "beta"), ((4.0, 25.0), (1.0, 1.0), (0.3, 7.0)))
def test_situ_is_exact_relative_to_its_result(alpha: float, beta: float) -> None:
    gate, up = sizes(1e-18, 20.0)
    out = activate("situ", gate, up, alpha, beta).double()
    exact = apply_activation("situ", gate.double(), up.double(), alpha, beta)
    assert ((out - exact) / exact).abs().max() < 3e-6


def test_gelu_tanh_does_not_cancel() -> None:
    gate, up = sizes(1e-18, 5.0)
    out = activate("gelu_tanh", gate, up, 1.0, 0.0).double()
    exact = apply_activation("gelu_tanh", gate.double(), up.double())
    assert ((out - exact) / exact).abs().max() < 6e-6  # of which most is exp's argument, up to 17


def test_tanh_of_zeros_and_of_what_is_large_or_not_finite() -> None:
    special = torch.tensor([0.0, -0.0, 1e30, -1e30, 3e38, float("inf"), float("-inf"), float("nan")])
    gate = special.repeat(VALUES // 8)
    out = activate("situ", gate, torch.full((VALUES,), 2.0), 4.0, 25.0)[:8]
    want = apply_activation("situ", special, torch.full((8,), 2.0))
    torch.testing.assert_close(out, want, rtol=1e-6, atol=0, equal_nan=True)
    assert want[5:].isnan().all() and want[:5].isfinite().all()
