"""The number code of the CUDA quantizer, compiled for the CPU: bit equality without a GPU.

Oracles: torch's own float8_e4m3fn conversion, and the table of e2m1 intervals.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from host_library import host_library
from nvfp4_cases import CASES, expected_quantization

# Tails of a 32-bit pattern below its upper half: every tie and every interval limit of both formats has at most
# five mantissa bits, so these reach each limit, its two neighbours, and the inside of each interval.
TAILS = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return host_library("nvfp4_block_host.cpp", tmp_path_factory.mktemp("host"))


def address(tensor: torch.Tensor) -> ctypes.c_void_p:
    assert tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())


def floats(first: float, last: float) -> torch.Tensor:
    """Floats from `first` to `last` (both >= 0): every upper half, with the tails above; the last one always."""
    start, stop = (int(torch.tensor(limit).view(torch.int32)) >> 16 for limit in (first, last))
    upper = torch.arange(start, stop + 1, dtype=torch.int64)[:, None] << 16
    numbers = (upper + torch.tensor(TAILS)).flatten().to(torch.int32).view(torch.float32)
    numbers = numbers[(numbers >= first) & (numbers <= last)]
    return torch.cat([numbers, torch.tensor([last])])


def test_e4m3_equals_torch(host: ctypes.CDLL) -> None:
    numbers = torch.cat([floats(0.0, 448.0), torch.tensor([float("nan")])])
    codes = torch.empty(len(numbers), dtype=torch.uint8)
    values = torch.empty(len(numbers))
    host.e4m3_codes(address(numbers), ctypes.c_int64(len(numbers)), address(codes), address(values))
    expected = numbers.to(torch.float8_e4m3fn)
    torch.testing.assert_close(codes, expected.view(torch.uint8), rtol=0, atol=0)
    torch.testing.assert_close(values[:-1], expected.float()[:-1], rtol=0, atol=0)


@pytest.mark.parametrize("saturate", [False, True])
def test_e2m1_equals_the_table(host: ctypes.CDLL, saturate: bool) -> None:
    below_seven = float(torch.nextafter(torch.tensor(7.0), torch.tensor(0.0)))
    magnitudes = floats(0.0, float("inf") if saturate else below_seven)
    numbers = torch.stack([magnitudes, -magnitudes], dim=1).flatten()
    numbers = torch.cat([numbers, torch.zeros(-len(numbers) % 8)])
    packed = torch.empty(len(numbers) // 8, dtype=torch.int32)
    host.e2m1_words(address(numbers), ctypes.c_int64(len(packed)), ctypes.c_bool(saturate), address(packed))
    found = (packed[:, None] >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15

    magnitude = numbers.abs().double()
    # Upper limits of codes 0..6; a tie belongs to the even code.
    expected = torch.zeros(len(numbers), dtype=torch.int32)
    for code, limit in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        expected += (magnitude > limit) if code % 2 == 0 else (magnitude >= limit)
    expected += torch.signbit(numbers).int() * 8
    torch.testing.assert_close(found.flatten().int(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_block_quantization_is_exact(host: ctypes.CDLL, name: str) -> None:
    x, gscale = CASES[name]()
    blocks = x.numel() // 16
    values = x.float().contiguous()
    by_block = gscale.expand(x.shape[0])[:, None].expand(-1, x.shape[1] // 16).contiguous()
    codes = torch.empty(x.shape[0], x.shape[1] // 2, dtype=torch.uint8)
    scale = torch.empty(x.shape[0], x.shape[1] // 16, dtype=torch.uint8)
    host.quantize_blocks(address(values), address(by_block), ctypes.c_int64(blocks), address(codes), address(scale))

    expected_codes, expected_scale = expected_quantization(x, gscale)
    torch.testing.assert_close(scale, expected_scale.view(torch.uint8), rtol=0, atol=0)
    torch.testing.assert_close(codes, expected_codes, rtol=0, atol=0)


def test_dynamic_gscale_is_the_definition(host: ctypes.CDLL) -> None:
    amax = torch.cat([floats(0.0, float("inf")), torch.tensor([float("nan"), 8.08e-33, 8.1e-33, 1e-44])])
    found = torch.empty_like(amax)
    host.dynamic_gscales(address(amax), ctypes.c_int64(len(amax)), address(found))
    expected = (torch.full_like(amax, 2688.0) / amax).clamp(max=2.0**118)
    expected = torch.where(amax == 0, 1.0, torch.where(amax < torch.inf, expected, torch.nan))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert found.isfinite().sum() > len(found) - 10


@pytest.mark.parametrize("divisor", [1, 2, 3, 5, 7, 48, 128, 180, 448, 641, 65_535, 65_537, 2**30, 2**31 - 1])
def test_quotients_are_exact(host: ctypes.CDLL, divisor: int) -> None:
    multiples = torch.arange(0, 2**31, max(divisor, 104_729), dtype=torch.int64) // divisor * divisor
    around = torch.cat([multiples - 1, multiples, multiples + 1, torch.tensor([2**31 - 1, 2**31 - 2])])
    dividends = around[(around >= 0) & (around < 2**31)].to(torch.int32)
    found = torch.empty_like(dividends)
    host.quotients(address(dividends), ctypes.c_int64(len(dividends)), ctypes.c_int32(divisor), address(found))
    assert torch.equal(found, dividends // divisor)
