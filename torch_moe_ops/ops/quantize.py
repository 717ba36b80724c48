"""The activation quantizer ops: the exact algorithm of the numerics contract, on every device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torch_moe_ops import _ext
from torch_moe_ops._check import check, describe, fail
from torch_moe_ops.ops.bind import attach, below_autograd
from torch_moe_ops.quant import nvfp4
from torch_moe_ops.schemes import ACT_FORMATS, FLOATS


def _check_rows(op: str, x: Tensor, act_format: str) -> None:
    """x [..., K] of a float dtype, K as the format needs it."""
    if x.dtype not in FLOATS:
        fail(op, "x", f"have one of the dtypes {[str(d) for d in FLOATS]}", x.dtype)
    if x.ndim < 1:
        fail(op, "x", "have shape [..., K]", x.shape)
    multiple, k = ACT_FORMATS[act_format].size_multiple, x.shape[-1]
    check(k % multiple == 0 and k > 0, lambda: describe(op, "x", f"have K a positive multiple of {multiple}", k))


def _check_gscale(op: str, x: Tensor, gscale: Tensor) -> None:
    if gscale.dtype != torch.float32:
        fail(op, "gscale", "have dtype torch.float32", gscale.dtype)
    rows = x.shape[:-1]
    if gscale.ndim:
        text = f"have shape () or {tuple(rows)} (one per row)"
        check(gscale.shape == rows, lambda: describe(op, "gscale", text, gscale.shape))


def _same_device(op: str, x: Tensor, gscale: Tensor) -> None:
    if gscale.device != x.device:
        fail(op, "gscale", f"be on {x.device} like x", gscale.device)


def _quantize_nvfp4(devices: bool) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    op = "quantize_nvfp4"

    def impl(x: Tensor, gscale: Tensor) -> tuple[Tensor, Tensor]:
        _check_rows(op, x, "nvfp4")
        _check_gscale(op, x, gscale)
        if not devices:
            with below_autograd():
                return nvfp4.quantize_activation(x, gscale)
        _same_device(op, x, gscale)
        with below_autograd():
            if x.is_cuda and _ext.has_cuda_extension():
                return _quantize_nvfp4_cuda(x, gscale)
            return nvfp4.quantize_activation(x, gscale)

    return impl


def _quantize_nvfp4_cuda(x: Tensor, gscale: Tensor) -> tuple[Tensor, Tensor]:
    rows, k = x.shape[:-1], x.shape[-1]
    per_row = gscale.reshape(-1).contiguous() if gscale.ndim else gscale
    codes, scale = torch.ops.moeq_C.quantize_nvfp4_cuda(x.reshape(-1, k).contiguous(), per_row)
    return codes.view(*rows, k // 2), scale.view(*rows, k // 16)


def _quantize_nvfp4_fake(x: Tensor, gscale: Tensor) -> tuple[Tensor, Tensor]:
    op = "quantize_nvfp4"
    _check_rows(op, x, "nvfp4")
    _check_gscale(op, x, gscale)
    _same_device(op, x, gscale)
    rows, k = x.shape[:-1], x.shape[-1]
    codes = x.new_empty((*rows, k // 2), dtype=torch.uint8)
    return codes, x.new_empty((*rows, k // 16), dtype=torch.float8_e4m3fn)


def _dynamic_gscale_nvfp4(x: Tensor) -> Tensor:
    _check_rows("dynamic_gscale_nvfp4", x, "nvfp4")
    with below_autograd():
        if x.is_cuda and _ext.has_cuda_extension():
            rows = x.reshape(-1, x.shape[-1]).contiguous()
            return torch.ops.moeq_C.dynamic_gscale_nvfp4_cuda(rows).view(x.shape[:-1])
        return nvfp4.dynamic_gscale(x)


def _dynamic_gscale_nvfp4_fake(x: Tensor) -> Tensor:
    _check_rows("dynamic_gscale_nvfp4", x, "nvfp4")
    return x.new_empty(x.shape[:-1], dtype=torch.float32)


attach("quantize_nvfp4", _quantize_nvfp4(devices=False), _quantize_nvfp4(devices=True), _quantize_nvfp4_fake)
attach("dynamic_gscale_nvfp4", _dynamic_gscale_nvfp4, _dynamic_gscale_nvfp4, _dynamic_gscale_nvfp4_fake)
