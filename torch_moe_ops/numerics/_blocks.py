"""Shapes of blocks along K, and of the scales that go with them."""

from __future__ import annotations

from torch import Tensor


def split_blocks(function: str, name: str, t: Tensor, block: int) -> Tensor:
    """[..., K] -> view [..., K / block, block]; ValueError unless K is a positive multiple of block."""
    k = t.shape[-1] if t.ndim else 0
    if k == 0 or k % block:
        raise ValueError(f"{function}: K of {name} must be a positive multiple of {block}, got shape {tuple(t.shape)}")
    return t.unflatten(-1, (k // block, block))


def align_leading(function: str, name: str, scale: Tensor, ndim: int) -> Tensor:
    """Append dimensions of size 1, so that scale's dimensions line up with the FIRST ones of an ndim tensor.

    [E] against [E, N, K] is one per matrix, [M] against [M, K] one per row; torch would line up the last ones.
    """
    if scale.ndim > ndim:
        raise ValueError(f"{function}: {name} must have at most {ndim} dimensions, got shape {tuple(scale.shape)}")
    return scale.reshape(scale.shape + (1,) * (ndim - scale.ndim))


def per_row(function: str, gscale: Tensor, x: Tensor) -> Tensor:
    """A factor of shape [] or x.shape[:-1], ready to be multiplied with blocks of rows: [..., 1]."""
    if gscale.ndim and gscale.shape != x.shape[:-1]:
        raise ValueError(
            f"{function}: gscale must have shape () or {tuple(x.shape[:-1])} (one per row), got {tuple(gscale.shape)}"
        )
    return gscale[..., None] if gscale.ndim else gscale


def require_shape(function: str, name: str, t: Tensor, shape: tuple[int, ...]) -> None:
    """ValueError unless t has this shape."""
    if tuple(t.shape) != tuple(shape):
        raise ValueError(f"{function}: {name} must have shape {tuple(shape)}, got {tuple(t.shape)}")
