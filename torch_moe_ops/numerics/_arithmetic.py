"""Float32 operations whose rounding is the same on every device."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def divide(a: Tensor | float, b: Tensor | float) -> Tensor:
    """fl(a / b): one true division; at least one argument is a tensor.

    A plain number must not reach torch's division: `number / tensor` is a reciprocal and a product,
    and on CUDA `tensor / number` multiplies by the number's reciprocal. Both round twice.
    """
    if isinstance(a, Tensor):
        return torch.div(a, b if isinstance(b, Tensor) else a.new_full((), b))
    if isinstance(b, Tensor):
        return torch.div(b.new_full((), a), b)
    raise TypeError("divide: one argument must be a Tensor, got two numbers")


def amax_or_nan(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """max |x| over dim in float32; NaN where any of these is NaN or infinite, to show in the scale."""
    amax = x.abs().amax(dim).float()
    return amax + amax * 0  # infinity times 0 is NaN


def require_floats(function: str, name: str, x: Tensor) -> None:
    """TypeError unless x is bfloat16, float16 or float32."""
    if x.dtype not in FLOATS:
        raise TypeError(f"{function}: {name} must have one of the dtypes {[str(d) for d in FLOATS]}, got {x.dtype}")


def require_dtype(function: str, name: str, t: Tensor, *dtypes: torch.dtype) -> None:
    """TypeError unless t has one of the dtypes."""
    if t.dtype not in dtypes:
        raise TypeError(f"{function}: {name} must have dtype {' or '.join(map(str, dtypes))}, got {t.dtype}")
