"""The NVFP4 activation quantizer of the Triton engine is bit for bit the reference's."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton_cases import DEVICE

from torch_moe_ops.kernels.triton.quantize import dynamic_gscale, quantize_blocks
from torch_moe_ops.quant import nvfp4

pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or TRITON_INTERPRET=1"
)
ROWS = 256


@triton.jit
def quantize_kernel(x_ptr, gscale_ptr, out_ptr, ROWS: tl.constexpr):
    at = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None] * 16 + tl.arange(0, 16)[None, :]
    x = tl.load(x_ptr + at).to(tl.float32)
    tl.store(out_ptr + at, quantize_blocks(x, tl.load(gscale_ptr), 1))


@triton.jit
def gscale_kernel(amax_ptr, out_ptr, ROWS: tl.constexpr):
    at = tl.arange(0, ROWS)
    tl.store(out_ptr + at, dynamic_gscale(tl.load(amax_ptr + at)))


def blocks(dtype: torch.dtype) -> torch.Tensor:
    """[16 * ROWS, 16]: ordinary blocks, blocks whose scale ties in e4m3, underflowing, saturating and zero ones."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn((16 * ROWS, 16), generator=g)
    x *= torch.exp2(torch.randint(-14, 6, (16 * ROWS, 1), generator=g).float())
    # Few significant bits: scales and codes then fall on ties all the time.
    x[: 8 * ROWS] = torch.randint(-32, 33, (8 * ROWS, 16), generator=g) / 8
    x[0], x[1], x[2] = 0.0, -0.0, 1e4
    return x.to(dtype)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.parametrize("gscale", (1.0, 336.0, 672.0, 2688.0 / 3.3, 1e-3))
def test_values_are_exact(dtype: torch.dtype, gscale: float) -> None:
    x, scale = blocks(dtype), torch.tensor(gscale)
    out = torch.empty(x.shape, device=DEVICE)
    quantize_kernel[(x.shape[0] // ROWS,)](x.to(DEVICE), scale.to(DEVICE), out, ROWS)
    expected = nvfp4.dequantize(*nvfp4.quantize_activation(x, scale))
    assert torch.equal(out.cpu(), expected)


def test_dynamic_gscale_is_exact() -> None:
    amax = torch.cat((torch.zeros(1), torch.rand(ROWS - 1, generator=torch.Generator().manual_seed(4)) * 9))
    out = torch.empty(ROWS, device=DEVICE)
    gscale_kernel[(1,)](amax.to(DEVICE), out, ROWS)
    assert torch.equal(out.cpu(), nvfp4.dynamic_gscale(amax[:, None]).reshape(-1))
