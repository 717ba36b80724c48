"""The public quantize and dequantize functions: pairs that go together, whatever form the scale has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import torch_moe_ops as moe

# function pair, and the largest relative L2 error of normal values (its quantization error)
PAIRS: dict[str, tuple[Callable[..., object], Callable[..., torch.Tensor], float]] = {
    "mxfp4": (moe.quantize_mxfp4, moe.dequantize_mxfp4, 0.13),
    "mxfp8": (moe.quantize_mxfp8, moe.dequantize_mxfp8, 0.03),
    "fp8": (moe.quantize_fp8, moe.dequantize_fp8, 0.03),
    "int8": (moe.quantize_int8, moe.dequantize_int8, 0.01),
    "int4": (moe.quantize_int4, moe.dequantize_int4, 0.12),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("shape", [(7, 96), (2, 3, 64), (0, 32)])
def test_round_trip(name: str, shape: tuple[int, ...]) -> None:
    quantize, dequantize, error = PAIRS[name]
    x = torch.randn(shape).bfloat16()
    values = dequantize(*quantize(x))
    assert values.shape == x.shape and values.dtype == torch.float32
    assert (values - x.float()).norm() <= error * x.float().norm()


def test_nvfp4_with_numbers_and_tensors() -> None:
    x = torch.randn(5, 64).bfloat16()
    gscale = 2688 / x.float().abs().max().item()
    for g in (gscale, torch.tensor(gscale), torch.full((5,), gscale)):
        codes, scale = moe.quantize_nvfp4(x, g)
        for alpha in (1 / gscale, torch.tensor(1 / gscale)):
            values = moe.dequantize_nvfp4(codes, scale, alpha)
            assert (values - x.float()).norm() <= 0.11 * x.float().norm()
    assert torch.equal(moe.dequantize_nvfp4(codes, scale), moe.dequantize_nvfp4(codes, scale, 1.0))


def test_fp8_scales_of_every_form() -> None:
    x = torch.randn(6, 200)
    codes, scale = moe.quantize_fp8(x, group=128)
    assert scale.shape == (6, 2)
    assert (moe.dequantize_fp8(codes, scale, group=128) - x).norm() <= 0.03 * x.norm()
    codes, scale = moe.quantize_fp8(x, 100.0)
    assert torch.equal(moe.dequantize_fp8(codes, scale), moe.dequantize_fp8(codes, scale[0, 0].item()))
    # A group beyond K is K; nothing of the group's size is allocated.
    assert torch.ops.moeq.quantize_fp8(x, None, 10**10)[1].shape == (6, 1)


def test_int8_scales_of_every_form() -> None:
    codes = torch.randint(-128, 128, (4, 64), dtype=torch.int8)
    scale = torch.rand(4, 2) + 0.1
    zeros = torch.randint(-8, 8, (4, 2), dtype=torch.int8)
    values = moe.dequantize_int8(codes, scale, zeros)
    whole = scale.repeat_interleave(32, 1), zeros.repeat_interleave(32, 1)
    assert torch.equal(values, (codes.float() - whole[1].float()) * whole[0])
    assert torch.equal(moe.dequantize_int8(codes, 0.5), codes.float() * 0.5)
