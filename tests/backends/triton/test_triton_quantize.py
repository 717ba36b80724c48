"""The activation quantizers of the Triton engine are bit for bit the reference's."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton_cases import DEVICE

from torch_moe_ops.backends.triton_engine.elements import amax_along, decode_e8m0, decode_minifloat
from torch_moe_ops.backends.triton_engine.quantize import quantize_given
from torch_moe_ops.backends.triton_engine.quantize_mx import quantize_mx
from torch_moe_ops.backends.triton_engine.quantize_nvfp4 import dynamic_gscale, quantize_nvfp4
from torch_moe_ops.backends.triton_engine.quantize_scaled import divide_and_round, dynamic_scale
from torch_moe_ops.core.schemes import SCHEMES
from torch_moe_ops.numerics import e8m0, fp6, fp8, int8, mx, nvfp4

pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or TRITON_INTERPRET=1"
)
ROWS = 256


@triton.jit
def quantize_kernel(x_ptr, gscale_ptr, out_ptr, ROWS: tl.constexpr):
    at = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None] * 16 + tl.arange(0, 16)[None, :]
    x = tl.load(x_ptr + at).to(tl.float32)
    tl.store(out_ptr + at, quantize_nvfp4(x, tl.load(gscale_ptr), 1))


@triton.jit
def gscale_kernel(amax_ptr, out_ptr, ROWS: tl.constexpr):
    at = tl.arange(0, ROWS)
    tl.store(out_ptr + at, dynamic_gscale(tl.load(amax_ptr + at)))


def blocks(dtype: torch.dtype) -> torch.Tensor:
    """[16 * ROWS, 16]: ordinary blocks, blocks whose scale ties in e4m3, underflowing, saturating and zero ones, and
    some that are not finite."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn((16 * ROWS, 16), generator=g)
    x *= torch.exp2(torch.randint(-14, 6, (16 * ROWS, 1), generator=g).float())
    # Few significant bits: scales and codes then fall on ties all the time.
    x[: 8 * ROWS] = torch.randint(-32, 33, (8 * ROWS, 16), generator=g) / 8
    x[0], x[1], x[2] = 0.0, -0.0, 1e4
    x[40, 3], x[42, 15], x[44, 0], x[46] = torch.nan, torch.inf, -torch.inf, torch.nan
    x[48, :3] = torch.tensor([torch.inf, torch.nan, -torch.inf])
    if dtype == torch.float32:  # Triton's interpreter loses subnormal numbers of bfloat16
        x[50:54] *= torch.tensor([1e-36, 1e-40, 1e-43, 1e-45])[:, None]
    return x.to(dtype)


def assert_same(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Number for number, NaN where NaN is."""
    torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.parametrize("gscale", (1.0, 336.0, 672.0, 2688.0 / 3.3, 1e-3, 2.0**118))
def test_values_are_exact(dtype: torch.dtype, gscale: float) -> None:
    x, scale = blocks(dtype), torch.tensor(gscale)
    out = torch.empty(x.shape, device=DEVICE)
    quantize_kernel[(x.shape[0] // ROWS,)](x.to(DEVICE), scale.to(DEVICE), out, ROWS)
    assert_same(out, nvfp4.dequantize(*nvfp4.quantize_activation(x, scale)))


def test_dynamic_gscale_is_exact() -> None:
    amax = torch.rand(ROWS, generator=torch.Generator().manual_seed(4)) * 9
    amax[:6] = torch.tensor([0.0, torch.nan, 8.08e-33, 8.1e-33, 1e-40, 1e-45])
    out = torch.empty(ROWS, device=DEVICE)
    gscale_kernel[(1,)](amax.to(DEVICE), out, ROWS)
    assert_same(out, nvfp4.dynamic_gscale(amax[:, None]).reshape(-1))


@triton.jit
def mx_kernel(x_ptr, out_ptr, FORMAT: tl.constexpr, ROWS: tl.constexpr):
    at = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(out_ptr + at, quantize_mx(tl.load(x_ptr + at).to(tl.float32), FORMAT, 1))


@triton.jit
def scaled_kernel(
    x_ptr, gscale_ptr, out_ptr, scale_ptr, FORMAT: tl.constexpr, STATIC: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = tl.load(x_ptr + at).to(tl.float32)
    if STATIC:
        y = quantize_given(x, tl.load(gscale_ptr), FORMAT, ROWS, 32)
    else:
        scale = dynamic_scale(amax_along(x, 1), FORMAT)
        y = divide_and_round(x, scale, FORMAT)
        tl.store(scale_ptr + row, scale.reshape(ROWS))
    tl.store(out_ptr + at, y)


@triton.jit
def decode_kernel(code_ptr, out_ptr, ELEMENT: tl.constexpr):
    at = tl.arange(0, 256)
    code = tl.load(code_ptr + at).to(tl.int32)
    tl.store(out_ptr + at, decode_e8m0(code) if ELEMENT == "e8m0" else decode_minifloat(code, ELEMENT))


def rows_of_32(dtype: torch.dtype) -> torch.Tensor:
    """As `blocks`, and a block next to nothing, one whose amax is the largest element, one with a lonely value."""
    x = blocks(dtype).float().reshape(-1, 32)
    # Normal numbers (Triton's interpreter loses subnormal ones of bfloat16) whose scale is none; none in float16.
    x[8], x[9] = torch.arange(32) * 2.0**-125, 0.0
    x[9, 3] = 448.0
    x[10], x[10, 0] = 0.0, -7.5
    return x.to(dtype)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.parametrize("act_format", ("mxfp8", "mxfp4", "mxfp6_e3m2", "mxfp6_e2m3"))
def test_mx_values_are_exact(dtype: torch.dtype, act_format: str) -> None:
    x = rows_of_32(dtype)
    out = torch.empty(x.shape, device=DEVICE)
    mx_kernel[(x.shape[0] // ROWS,)](x.to(DEVICE), out, act_format, ROWS)
    element = SCHEMES[act_format].element
    expected = mx.dequantize_mx(*mx.quantize_mx(x, element, "rceil"), element)
    assert_same(out, expected.masked_fill(expected.abs() < 2.0**-126, 0.0))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.parametrize("gscale", (None, 0.37, 90.0))
@pytest.mark.parametrize("act_format", ("fp8", "int8"))
def test_scaled_codes_are_exact(dtype: torch.dtype, gscale: float | None, act_format: str) -> None:
    x, given = rows_of_32(dtype), None if gscale is None else torch.tensor(gscale)
    out, scale = torch.empty(x.shape, device=DEVICE), torch.empty(x.shape[0], device=DEVICE)
    factor = torch.ones((), device=DEVICE) if given is None else given.to(DEVICE)
    scaled_kernel[(x.shape[0] // ROWS,)](x.to(DEVICE), factor, out, scale, act_format, given is not None, ROWS)
    codes, expected = (fp8.quantize_fp8 if act_format == "fp8" else int8.quantize_int8)(x, given)
    values = codes.float()
    if act_format == "int8":  # has no NaN: the kernels' values do
        bad = ~x.isfinite() if given is not None else (~x.isfinite()).any(1, keepdim=True)
        values = values.masked_fill(bad, torch.nan)
    assert_same(out, values)
    if given is None:
        assert_same(scale, expected)


@pytest.mark.parametrize("element", ("e4m3", "e3m2", "e2m3", "e8m0"))
def test_decoding_is_exact(element: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8) & (255 if element in ("e4m3", "e8m0") else 63)
    out = torch.empty(256, device=DEVICE)
    decode_kernel[(1,)](codes.to(DEVICE), out, element)
    if element == "e8m0":
        assert_same(out, e8m0.decode(codes))
    elif element == "e4m3":
        number = (codes & 127) != 127
        assert torch.equal(out.cpu()[number], codes.view(torch.float8_e4m3fn).float()[number])
    else:
        assert torch.equal(out.cpu(), fp6.decode(codes, element))
