"""The CUDA quantizer of NVFP4 activations: bit equality with its definition and with the codec in pure torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from nvfp4_cases import CASES, expected_quantization

from torch_moe_ops.core import extension
from torch_moe_ops.numerics import nvfp4

REASON = "torch sees no CUDA device" if not torch.cuda.is_available() else extension.cuda_extension_reason()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(REASON), reason=REASON or "CUDA is there")]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def quantize(x: torch.Tensor, gscale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scale = torch.ops.moeq_C.quantize_nvfp4_cuda(x.cuda(), gscale.cuda())
    assert codes.is_contiguous() and codes.dtype == torch.uint8
    assert scale.is_contiguous() and scale.dtype == torch.float8_e4m3fn
    return codes, scale


def dynamic_gscale(x: torch.Tensor) -> torch.Tensor:
    gscale: torch.Tensor = torch.ops.moeq_C.dynamic_gscale_nvfp4_cuda(x.cuda())
    return gscale


def assert_same(found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Codes and scales bit for bit."""
    codes, scale = (tensor.cpu() for tensor in found)
    assert codes.shape == expected[0].shape and scale.shape == expected[1].shape
    assert torch.equal(scale.view(torch.uint8), expected[1].cpu().view(torch.uint8))
    assert torch.equal(codes, expected[0].cpu())


def range_over(amax: torch.Tensor) -> torch.Tensor:
    """fl(2688 / amax). Dividing a number by a tensor would round twice: torch multiplies by the reciprocal."""
    return torch.full_like(amax, 2688.0) / amax


@pytest.mark.parametrize("name", CASES)
def test_equals_the_definition(name: str) -> None:
    x, gscale = CASES[name]()
    assert_same(quantize(x, gscale), expected_quantization(x, gscale))


@pytest.mark.parametrize("name", CASES)
def test_equals_the_codec(name: str) -> None:
    x, gscale = CASES[name]()
    assert_same(quantize(x, gscale), nvfp4.quantize_activation(x, gscale))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 64), (1, 16), (3, 0), (1, 2880), (257, 16), (129, 7168), (4096, 2048)])
def test_shapes_and_dynamic_scale(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    gscale = dynamic_gscale(x)
    amax = x.float().abs().amax(1) if shape[1] else torch.zeros(shape[0])
    expected = torch.where(amax == 0, 1.0, range_over(amax))
    assert torch.equal(gscale.cpu(), expected)
    assert_same(quantize(x, gscale), expected_quantization(x, expected))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [16, 512, 528, 4096, 20_000 * 16])
def test_dynamic_scale_finds_every_position(columns: int, dtype: torch.dtype) -> None:
    """The maximum of a row counts wherever it stands, and a zero or NaN row leaves its neighbours alone."""
    positions = torch.tensor([0, columns - 1, columns // 2, 7])
    x = torch.rand(6, columns).to(dtype) * 0.5
    x[torch.arange(4), positions] = torch.tensor([-3.0, 5.0, -7.0, 11.0]).to(dtype)
    x[4] = -0.0
    x[5, columns // 3] = float("nan")
    x = torch.cat([x, torch.zeros(2, columns, dtype=dtype)])
    x[6, columns // 2], x[7, 3] = -float("inf"), torch.finfo(dtype).tiny
    found = dynamic_gscale(x).cpu()
    expected = torch.cat([range_over(torch.tensor([3.0, 5.0, 7.0, 11.0])), torch.tensor([1.0])])
    assert torch.equal(found[:5], expected)
    assert found[5:7].isnan().all()
    assert found[7] == min(2688.0 / torch.finfo(dtype).tiny, 2.0**118)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_view_that_starts_anywhere(dtype: torch.dtype) -> None:
    storage = torch.randn(3 * 64 + 1).to(dtype).cuda()
    x = storage[1:].view(3, 64)
    assert x.data_ptr() % 16 != 0
    gscale = dynamic_gscale(x)
    assert torch.equal(gscale, dynamic_gscale(x.clone()))
    assert_same(quantize(x, gscale), expected_quantization(x.cpu(), gscale.cpu()))


def test_more_than_2_to_31_elements() -> None:
    """Offsets beyond 32 bits: rows at the end, and around element 2^31 and 2^32, come out like rows on their own."""
    columns = 7168
    rows = 2**32 // columns + 300
    free, _ = torch.cuda.mem_get_info()
    needed = rows * columns * 4
    if free < needed:
        pytest.skip(f"needs {needed >> 30} GiB of device memory, {free >> 30} GiB are free")
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")
    x.normal_()
    gscale = dynamic_gscale(x)
    codes, scale = quantize(x, gscale)
    for middle in (2**31 // columns, 2**32 // columns, rows - 20):
        part = slice(middle - 20, middle + 20)
        expected = expected_quantization(x[part].cpu(), gscale[part].cpu())
        assert_same((codes[part], scale[part]), expected)
        assert torch.equal(gscale[part].cpu(), range_over(x[part].cpu().float().abs().amax(1)))


def test_runs_on_the_current_stream() -> None:
    x = torch.randn(64, 4096, dtype=torch.bfloat16, device="cuda")
    gscale = torch.tensor(100.0, device="cuda")
    expected = quantize(x, gscale)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    late = torch.zeros_like(x)
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # a kernel on any other stream would see the zeros
        late.copy_(x)
        found = quantize(late, gscale)
    side.synchronize()
    assert_same(found, expected)


def test_is_captured_by_a_cuda_graph() -> None:
    x = torch.randn(33, 2048, dtype=torch.bfloat16, device="cuda")
    quantize(x, dynamic_gscale(x))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gscale = dynamic_gscale(x)
        codes, scale = quantize(x, gscale)
    x.copy_(torch.randn(33, 2048) * 9)
    graph.replay()
    torch.cuda.synchronize()
    assert_same((codes, scale), expected_quantization(x.cpu(), gscale.cpu()))
    assert torch.equal(gscale.cpu(), range_over(x.cpu().float().abs().amax(1)))


ERRORS: dict[str, tuple[Callable[[], object], str]] = {
    "columns": (lambda: quantize(torch.ones(2, 24), torch.ones(())), "x.shape\\[1\\] must be a multiple of 16, got 24"),
    "strided": (lambda: quantize(torch.ones(32, 32).cuda().t()[:, :16], torch.ones(())), "contiguous CUDA matrix"),
    "vector": (lambda: quantize(torch.ones(32), torch.ones(())), "contiguous CUDA matrix"),
    "dtype": (lambda: quantize(torch.ones(2, 32).double(), torch.ones(())), "bfloat16, float16 or float32"),
    "gscale rows": (lambda: quantize(torch.ones(2, 32), torch.ones(3)), "one number per row"),
    "gscale dtype": (lambda: quantize(torch.ones(2, 32), torch.ones(()).bfloat16()), "float32 scalar"),
    "gscale device": (
        lambda: torch.ops.moeq_C.quantize_nvfp4_cuda(torch.ones(2, 32).cuda(), torch.ones(2)),
        "on the device of x",
    ),
    "dynamic columns": (lambda: dynamic_gscale(torch.ones(2, 24)), "multiple of 16"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_memory_is_protected(name: str) -> None:
    call, message = ERRORS[name]
    with pytest.raises(RuntimeError, match=message):
        call()
