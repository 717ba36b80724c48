"""The ops `swizzle_scale` and `unswizzle_scale`: the 128x4 tiling of block scales."""

from __future__ import annotations

from torch import Tensor

from torch_moe_ops.core.check import check, check_given, describe, fail
from torch_moe_ops.numerics import swizzle
from torch_moe_ops.ops.bind import attach, like_a_kernel

_ROWS, _COLS = 128, 4  # of one tile


def _padded(rows: int, cols: int) -> int:
    return -(-rows // _ROWS) * _ROWS * (-(-cols // _COLS) * _COLS)


def _check_element(op: str, argument: str, t: Tensor, ndim: int, shape: str) -> None:
    check_given(op, argument, t)
    if t.element_size() not in (1, 2):
        fail(op, argument, "have a dtype of 1 or 2 bytes", t.dtype)
    if t.ndim < ndim:
        fail(op, argument, f"have shape {shape}", t.shape)


def _swizzle(scale: Tensor) -> Tensor:
    _check_element("swizzle_scale", "scale", scale, 2, "[..., rows, cols]")
    with like_a_kernel(scale.device.type):
        return swizzle.swizzle_scale(scale)


def _swizzle_fake(scale: Tensor) -> Tensor:
    _check_element("swizzle_scale", "scale", scale, 2, "[..., rows, cols]")
    return scale.new_empty((*scale.shape[:-2], _padded(scale.shape[-2], scale.shape[-1])))


def _check_unswizzle(swizzled: Tensor, rows: int, cols: int) -> None:
    op = "unswizzle_scale"
    _check_element(op, "swizzled", swizzled, 1, "[..., padded rows * padded cols]")
    for name, value in (("rows", rows), ("cols", cols)):
        check(value >= 0, lambda name=name, value=value: describe(op, name, "be at least 0", value))  # type: ignore[misc]
    size, got = _padded(rows, cols), swizzled.shape[-1]
    text = f"hold {size} elements in its last dimension (rows={rows}, cols={cols} padded to 128x4 tiles)"
    check(got == size, lambda: describe(op, "swizzled", text, got))


def _unswizzle(swizzled: Tensor, rows: int, cols: int) -> Tensor:
    _check_unswizzle(swizzled, rows, cols)
    with like_a_kernel(swizzled.device.type):
        return swizzle.unswizzle_scale(swizzled, rows, cols)


def _unswizzle_fake(swizzled: Tensor, rows: int, cols: int) -> Tensor:
    _check_unswizzle(swizzled, rows, cols)
    return swizzled.new_empty((*swizzled.shape[:-1], rows, cols))


attach("swizzle_scale", _swizzle, _swizzle, _swizzle_fake)
attach("unswizzle_scale", _unswizzle, _unswizzle, _unswizzle_fake)
