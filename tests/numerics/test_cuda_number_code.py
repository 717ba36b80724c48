"""The number code of the CUDA kernels, compiled for the CPU: what it computes, without a GPU.

Oracles: torch's own float8_e4m3fn conversion, the table of e2m1 intervals, and torch's functions in float64.
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


@pytest.fixture(scope="module")
def sigmoids(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return host_library("sigmoids_host.cpp", tmp_path_factory.mktemp("sigmoids"))


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


def off_by(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest relative error, in units of 2^-24; below the normal numbers of float32 relative to the least of them."""
    return float(((found.double() - exact).abs() / exact.abs().clamp(min=2.0**-126)).max() * 2**24)


def test_tanh_is_exact_relative_to_its_result(sigmoids: ctypes.CDLL) -> None:
    magnitudes = floats(0.0, float("inf"))
    numbers = torch.cat([magnitudes, -magnitudes])
    found = torch.empty_like(numbers)
    sigmoids.tanhs(address(numbers), ctypes.c_int64(len(numbers)), address(found))
    exact = numbers.double().tanh()
    assert off_by(found, exact) < 2.0  # with the host's exp and quotient
    near_zero = numbers.abs() < 0.7
    assert near_zero.sum() > len(numbers) // 3
    assert off_by(found[near_zero], exact[near_zero]) < 1.5  # the same on a device
    assert torch.equal(found.signbit(), numbers.signbit())
    assert found.abs().max() == 1.0

    nan = torch.tensor([float("nan")])
    sigmoids.tanhs(address(nan), ctypes.c_int64(1), address(nan))
    assert nan.isnan()


def test_gelu_tanh_does_not_cancel(sigmoids: ctypes.CDLL) -> None:
    magnitudes = floats(2.0**-60, 5.0)
    numbers = torch.cat([magnitudes, -magnitudes])
    found = torch.empty_like(numbers)
    sigmoids.gelu_tanhs(address(numbers), ctypes.c_int64(len(numbers)), address(found))
    exact = torch.nn.functional.gelu(numbers.double(), approximate="tanh")
    inner = (numbers.double() + 0.044715 * numbers.double() ** 3).abs()
    # An argument of exp has relative errors of its own: by its size, from rounding it.
    assert (((found.double() - exact) / exact).abs() * 2**24 < 4 + 10 * inner).all()

    special = torch.tensor([float("inf"), float("-inf"), float("nan"), -1e30, 1e30])
    results = torch.empty_like(special)
    sigmoids.gelu_tanhs(address(special), ctypes.c_int64(len(special)), address(results))
    expected = torch.tensor([float("inf"), float("nan"), float("nan"), 0.0, 1e30])
    torch.testing.assert_close(results, expected, rtol=0, atol=0, equal_nan=True)


def test_situ_of_tiny_numbers(sigmoids: ctypes.CDLL) -> None:
    sizes = torch.logspace(-18, 2, 4001).float()
    gates, ups = torch.cat([sizes, -sizes, sizes, -sizes]), torch.cat([sizes, sizes, sizes.flip(0), -sizes.flip(0)])
    gates = gates.clamp(min=-20.0)  # below, exp's argument decides
    for alpha, beta in ((4.0, 25.0), (1.0, 1.0), (0.3, 7.0)):
        found = torch.empty_like(gates)
        constants = ctypes.c_float(alpha), ctypes.c_float(beta)
        sigmoids.situs(address(gates), address(ups), ctypes.c_int64(len(gates)), *constants, address(found))
        alpha, beta = (constant.value for constant in constants)
        gate, up = gates.double(), ups.double()
        exact = alpha * (gate / alpha).tanh() * gate.sigmoid() * (beta * (up / beta).tanh())
        assert off_by(found, exact) < 10, (alpha, beta)  # several roundings, and those of exp's argument
