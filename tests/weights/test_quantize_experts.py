"""quantize_experts refuses weights that no scale is for."""

from __future__ import annotations

import pytest
import torch

import torch_moe_ops as moe
from torch_moe_ops.core.schemes import SCHEMES

QUANTIZED = [name for name in SCHEMES if name != "none"]


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("name", ["w13", "w2"])
@pytest.mark.parametrize("scheme", QUANTIZED)
def test_weights_that_are_not_finite_are_refused(scheme: str, name: str, value: float) -> None:
    weights = {"w13": torch.randn(3, 64, 128), "w2": torch.randn(3, 128, 32)}
    weights[name][2, 5, 7] = value
    with pytest.raises(ValueError, match=rf"quantize_experts: {name} must be finite .* in expert 2 at \(5, 7\)"):
        moe.quantize_experts(**weights, scheme=scheme)


def test_unquantized_weights_are_kept_as_they_are() -> None:
    w13 = torch.full((1, 64, 128), torch.inf)
    assert moe.quantize_experts(w13, torch.zeros(1, 128, 32), "none").w13 is w13


def test_one_graph() -> None:
    """A compiler's graph has no wait for what is not finite."""
    w13, w2 = torch.randn(2, 64, 128), torch.randn(2, 128, 32)

    def codes(w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        return moe.quantize_experts(w13, w2, "int8").w13

    compiled = torch.compile(codes, backend="eager", fullgraph=True)
    assert torch.equal(compiled(w13, w2), codes(w13, w2))
