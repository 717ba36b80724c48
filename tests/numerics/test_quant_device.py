"""Codecs give the same bits on CUDA as on the CPU, and decoding can be captured in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torch_moe_ops.numerics import e4m3, fp8, int4, int8, mx, nvfp4, swizzle

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device to compare the CPU with")

Function = Callable[[Tensor], tuple[Tensor | None, ...]]


def _scaled(factor: float) -> Function:
    return lambda x: nvfp4.quantize_activation(x, torch.full(x.shape[:-1], factor, device=x.device))


FUNCTIONS: dict[str, Function] = {
    "nvfp4_dynamic": lambda x: nvfp4.quantize_activation(x, nvfp4.dynamic_gscale(x)),
    "nvfp4_static": _scaled(37.3),
    "nvfp4_tiny_gscale": _scaled(1e-37),
    "nvfp4_huge_gscale": _scaled(3e38),
    "nvfp4_weight": nvfp4.quantize_weight,
    "nvfp4_values": lambda x: (nvfp4.dequantize(*nvfp4.quantize_weight(x)),),
    "fp8_rows": fp8.quantize_fp8,
    "fp8_static": lambda x: fp8.quantize_fp8(x, torch.tensor(0.37, device=x.device)),
    "fp8_group": fp8.quantize_fp8_group,
    "fp8_block": fp8.quantize_weight_block,
    "fp8_from_float64": lambda x: (e4m3.encode(x.double() / 3),),
    "int8_rows": int8.quantize_int8,
    "int8_channel": lambda x: int8.quantize_weight_channel(x, torch.bfloat16),
    "int4": int4.quantize_weight_group,
    "int4_asymmetric": lambda x: int4.quantize_weight_group(x, symmetric=False),
    "swizzle": lambda x: (swizzle.swizzle_scale(nvfp4.quantize_weight(x)[1]),),
}
for _element in ("e2m1", "e4m3", "e3m2", "e2m3"):
    for _rule in ("floor", "rceil", "even"):
        FUNCTIONS[f"mx_{_element}_{_rule}"] = lambda x, e=_element, r=_rule: mx.quantize_mx(x, e, r)  # type: ignore[misc]


def inputs(dtype: torch.dtype) -> Tensor:
    """Rows of very different sizes, down to subnormals, with zero blocks and signed zeros."""
    x = torch.randn(300, 256, generator=torch.Generator().manual_seed(0)).double()
    exponent = torch.linspace(-140, 120, 300) if dtype != torch.float16 else torch.linspace(-24, 12, 300)
    x = (x * 2.0 ** exponent[:, None].double()).to(dtype)
    x[::7, 32:96], x[3::7, ::5] = 0.0, -0.0
    return x


def byte_view(t: Tensor) -> Tensor:
    return t.cpu().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_cuda_gives_the_bits_of_the_cpu(name: str, dtype: torch.dtype) -> None:
    x = inputs(dtype)
    for ours, theirs in zip(FUNCTIONS[name](x), FUNCTIONS[name](x.cuda()), strict=True):
        if ours is None or theirs is None:
            assert ours is None and theirs is None
        else:
            assert torch.equal(byte_view(ours), byte_view(theirs))


def test_quantizing_and_decoding_can_be_captured() -> None:
    x = inputs(torch.bfloat16).cuda()

    def values() -> tuple[Tensor, ...]:
        codes, scale = nvfp4.quantize_activation(x, nvfp4.dynamic_gscale(x))
        fp8_values = fp8.dequantize(*fp8.quantize_fp8(x))
        return nvfp4.dequantize(codes, scale), mx.dequantize_mx(*mx.quantize_mx(x, "e2m1"), "e2m1"), fp8_values

    values()  # warm up outside of the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = values()
    x.mul_(0.75)
    graph.replay()
    for got, expected in zip(captured, values(), strict=True):
        assert torch.equal(got, expected)
