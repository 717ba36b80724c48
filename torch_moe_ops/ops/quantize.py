"""The activation quantizer ops: the exact algorithms of the numerics contract, on every device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.core import extension
from torch_moe_ops.core.check import check, check_given, describe, fail
from torch_moe_ops.core.device_code import check_device
from torch_moe_ops.core.schemes import ACT_FORMATS, FLOATS, ceil_div
from torch_moe_ops.numerics import fp8, int8, mx, nvfp4
from torch_moe_ops.numerics.e8m0 import RULES
from torch_moe_ops.ops.alignment import aligned
from torch_moe_ops.ops.bind import attach, like_a_kernel

Pair = tuple[Tensor, Tensor]


def _check_rows(op: str, x: Tensor, act_format: str) -> None:
    """x [..., K] of a float dtype, K as the format needs it."""
    check_given(op, "x", x)
    if x.dtype not in FLOATS:
        fail(op, "x", f"have one of the dtypes {[str(d) for d in FLOATS]}", x.dtype)
    if x.ndim < 1:
        fail(op, "x", "have shape [..., K]", x.shape)
    multiple, k = ACT_FORMATS[act_format].size_multiple, x.shape[-1]
    check(k % multiple == 0 and k > 0, lambda: describe(op, "x", f"have K a positive multiple of {multiple}", k))


def _check_gscale(op: str, x: Tensor, gscale: Tensor | None) -> None:
    if gscale is None:
        return
    if gscale.dtype != torch.float32:
        fail(op, "gscale", "have dtype torch.float32", gscale.dtype)
    rows = x.shape[:-1]
    if gscale.ndim:
        text = f"have shape () or {tuple(rows)} (one per row)"
        check(gscale.shape == rows, lambda: describe(op, "gscale", text, gscale.shape))
    if gscale.device != x.device:
        fail(op, "gscale", f"be on {x.device} like x", gscale.device)


def _empty(x: Tensor, act_format: str, scale_columns: int | None) -> Pair:
    """Codes [..., K storage], and scales [..., columns] (None: [...])."""
    act, rows, k = ACT_FORMATS[act_format], x.shape[:-1], x.shape[-1]
    scale_shape = rows if scale_columns is None else (*rows, scale_columns)
    codes = x.new_empty((*rows, k // act.pack), dtype=act.dtype)
    return codes, x.new_empty(scale_shape, dtype=act.scale_dtype)


def _attach(op: str, checks: Callable[..., None], run: Callable[..., Pair], fake: Callable[..., Pair]) -> None:
    """One body for every device, and a fake that makes the same checks."""

    def impl(*args: Any, **kwargs: Any) -> Pair:
        checks(*args, **kwargs)
        with like_a_kernel(args[0].device.type):
            return run(*args, **kwargs)

    def checked_fake(*args: Any, **kwargs: Any) -> Pair:
        checks(*args, **kwargs)
        return fake(*args, **kwargs)

    attach(op, impl, impl, checked_fake)


def _check_nvfp4(x: Tensor, gscale: Tensor) -> None:
    _check_rows("quantize_nvfp4", x, "nvfp4")
    check_given("quantize_nvfp4", "gscale", gscale)
    _check_gscale("quantize_nvfp4", x, gscale)


def _run_nvfp4(x: Tensor, gscale: Tensor) -> Pair:
    if not (x.is_cuda and extension.has_cuda_extension()):
        return nvfp4.quantize_activation(x, gscale)
    check_device("quantize_nvfp4", "x", x.device)
    rows, k = x.shape[:-1], x.shape[-1]
    per_row = gscale.reshape(-1).contiguous() if gscale.ndim else gscale
    codes, scale = torch.ops.moeq_C.quantize_nvfp4_cuda(aligned(x.reshape(-1, k).contiguous()), per_row)
    return codes.view(*rows, k // 2), scale.view(*rows, k // 16)


_attach("quantize_nvfp4", _check_nvfp4, _run_nvfp4, lambda x, gscale: _empty(x, "nvfp4", x.shape[-1] // 16))


def _attach_mx(op: str, act_format: str, element: str) -> None:
    def checks(x: Tensor, rule: str = "rceil") -> None:
        _check_rows(op, x, act_format)
        if rule not in RULES:
            fail(op, "rule", f"be one of {list(RULES)}", rule)

    def run(x: Tensor, rule: str = "rceil") -> Pair:
        return mx.quantize_mx(x, element, rule)

    def fake(x: Tensor, rule: str = "rceil") -> Pair:
        return _empty(x, act_format, x.shape[-1] // 32)

    _attach(op, checks, run, fake)


_attach_mx("quantize_mxfp4", "mxfp4", "e2m1")
_attach_mx("quantize_mxfp8", "mxfp8", "e4m3")


def _check_fp8(x: Tensor, gscale: Tensor | None = None, group: int = 0) -> None:
    op = "quantize_fp8"
    _check_rows(op, x, "fp8")
    _check_gscale(op, x, gscale)
    if group < 0:
        fail(op, "group", "be 0 (the whole row) or positive", group)
    if group and gscale is not None:
        fail(op, "group", "be 0 where gscale is given", group)


def _run_fp8(x: Tensor, gscale: Tensor | None = None, group: int = 0) -> Pair:
    if group:
        return fp8.quantize_fp8_group(x, group)
    codes, scale = fp8.quantize_fp8(x, gscale)
    return codes, scale.expand(x.shape[:-1])[..., None].contiguous()


def _fake_fp8(x: Tensor, gscale: Tensor | None = None, group: int = 0) -> Pair:
    return _empty(x, "fp8", ceil_div(x.shape[-1], group) if group else 1)


_attach("quantize_fp8", _check_fp8, _run_fp8, _fake_fp8)


def _check_int8(x: Tensor, gscale: Tensor | None = None) -> None:
    _check_rows("quantize_int8", x, "int8")
    _check_gscale("quantize_int8", x, gscale)


def _run_int8(x: Tensor, gscale: Tensor | None = None) -> Pair:
    codes, scale = int8.quantize_int8(x, gscale)
    return codes, scale.expand(x.shape[:-1])[..., None].contiguous()


_attach("quantize_int8", _check_int8, _run_int8, lambda x, gscale=None: _empty(x, "int8", 1))


def _dynamic_gscale_nvfp4(x: Tensor) -> Tensor:
    _check_rows("dynamic_gscale_nvfp4", x, "nvfp4")
    with like_a_kernel(x.device.type):
        if x.is_cuda and extension.has_cuda_extension():
            check_device("dynamic_gscale_nvfp4", "x", x.device)
            rows = aligned(x.reshape(-1, x.shape[-1]).contiguous())
            return torch.ops.moeq_C.dynamic_gscale_nvfp4_cuda(rows).view(x.shape[:-1])
        return nvfp4.dynamic_gscale(x)


def _dynamic_gscale_nvfp4_fake(x: Tensor) -> Tensor:
    _check_rows("dynamic_gscale_nvfp4", x, "nvfp4")
    return x.new_empty(x.shape[:-1], dtype=torch.float32)


attach("dynamic_gscale_nvfp4", _dynamic_gscale_nvfp4, _dynamic_gscale_nvfp4, _dynamic_gscale_nvfp4_fake)
