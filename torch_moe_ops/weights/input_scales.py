"""Calibrated activation scales out of a quant config, and weight scales out of products with them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torch_moe_ops.config._require import require
from torch_moe_ops.config.quant_config import FusedMoEQuantConfig

AGREEMENT = 1e-5  # relative, of a product and its factors, each rounded to float32


def input_scale_of(owner: str, config: FusedMoEQuantConfig, gemm: str) -> Tensor | None:
    """[] or [num_experts], multiplies; from `a*_scale`, else from `a*_gscale`; None where the config has neither.

    A gscale that was made as fl(1 / scale) comes back from `prepare`, fl(1 / fl(1 / gscale)), bit for bit; any other
    one may differ in its last bit.

    Args:
        gemm: "1" for the input, "2" for the intermediate.

    Raises ValueError, in the name of `owner`, for values that are no scales, or a scale and gscale that disagree.
    """
    desc = config._a1 if gemm == "1" else config._a2
    for field, tensor in (("scale", desc.scale), ("gscale", desc.gscale)):
        if tensor is None:
            continue
        name = f"a{gemm}_{field}"
        require(bool((tensor.isfinite() & (tensor > 0)).all()), owner, name, "be positive and finite", "other values")
    scale, gscale = (None if t is None else t.reshape(()) if t.numel() == 1 else t for t in (desc.scale, desc.gscale))
    if gscale is None:
        return scale
    inverse = gscale.reciprocal()
    if scale is None:
        return inverse
    require(agrees(inverse, scale), owner, f"a{gemm}_gscale", f"be 1 / a{gemm}_scale", "other values")
    return scale


def agrees(product: Tensor, factors: Tensor) -> bool:
    """Whether two ways to the same float32 numbers, of shapes that broadcast, differ by their roundings only."""
    a, b = torch.broadcast_tensors(product, factors)
    return torch.allclose(a, b, rtol=AGREEMENT, atol=0)


def divided_by(alpha: Tensor, input_scale: Tensor) -> Tensor:
    """The scale_2 for which fl(input_scale * scale_2) == alpha where there is one, else one unit next to alpha.

    One division by the very number that `prepare` multiplies with. alpha * gscale would carry the rounding of
    1 / gscale into the product.
    """
    factor = input_scale[:, None] if input_scale.ndim and alpha.ndim == 2 else input_scale
    return _adjusted(alpha / factor, lambda scale_2: factor * scale_2, alpha)


def _adjusted(guess: Tensor, forward: Callable[[Tensor], Tensor], target: Tensor) -> Tensor:
    """guess or one of its two neighbours in float32: one that forward takes to target, if any does."""
    best = guess
    for direction in (0.0, torch.inf):
        other = torch.nextafter(guess, torch.full_like(guess, direction))
        best = torch.where((forward(best) != target) & (forward(other) == target), other, best)
    return best
