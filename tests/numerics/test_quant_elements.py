"""Element codecs against tables built from the formats' definitions, in float64, with exact arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from torch_moe_ops.numerics import e2m1, e4m3, e8m0, fp6

FLOAT_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def magnitudes(mantissa_bits: int, bias: int, codes: int) -> np.ndarray:
    """Values of the first `codes` non-negative codes of a small float, by definition."""
    values = []
    for code in range(codes):
        field, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        fraction = mantissa / (1 << mantissa_bits)
        values.append((fraction if field == 0 else 1 + fraction) * 2.0 ** (max(field, 1) - bias))
    return np.array(values)


TABLES: dict[str, np.ndarray] = {
    "e2m1": magnitudes(1, 1, 8),
    "e4m3": magnitudes(3, 7, 127),
    "e3m2": magnitudes(2, 3, 32),
    "e2m3": magnitudes(3, 1, 32),
}
SIGN = {"e2m1": 8, "e4m3": 128, "e3m2": 32, "e2m3": 32}


def encode(element: str, y: Tensor) -> Tensor:
    """Codes as uint8, one an element."""
    if element == "e2m1":
        return e2m1.encode(y)
    return e4m3.encode(y).view(torch.uint8) if element == "e4m3" else fp6.encode(y, element)


def decode(element: str, codes: Tensor) -> Tensor:
    if element == "e2m1":
        return e2m1.decode(codes)
    return e4m3.decode(codes.view(torch.float8_e4m3fn)) if element == "e4m3" else fp6.decode(codes, element)


def nearest(element: str, y: np.ndarray) -> np.ndarray:
    """Nearest code, ties to the even one, by comparing distances; float64 y for which these are exact."""
    table = TABLES[element]
    a = np.minimum(np.abs(y.astype(np.float64)), table[-1])
    distance = np.abs(a[:, None] - table[None, :])
    best = distance.min(1, keepdims=True)
    even = np.where((distance == best) & (np.arange(len(table)) % 2 == 0), 1, 0)
    code = np.where(even.any(1), even.argmax(1), distance.argmin(1))
    return (code + np.signbit(y) * SIGN[element]).astype(np.uint8)


def interesting(element: str) -> np.ndarray:
    """Every value, every midpoint, and the float32 neighbours of both; beyond the maximum; zeros; both signs."""
    table = TABLES[element]
    points = np.concatenate([table, (table[1:] + table[:-1]) / 2, [table[-1] * f for f in (1.01, 1.0625, 1.5, 1e6)]])
    points = points.astype(np.float32)
    inf = np.float32(np.inf)
    points = np.concatenate([points, np.nextafter(points, inf), np.nextafter(points, -inf)])
    return np.concatenate([points, -points, np.array([0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-38], dtype=np.float32)])


@pytest.mark.parametrize("element", TABLES)
def test_every_code_round_trips(element: str) -> None:
    size = len(TABLES[element])
    codes = torch.cat([torch.arange(size), torch.arange(size) + SIGN[element]]).to(torch.uint8)
    values = decode(element, codes)
    expected = torch.from_numpy(np.concatenate([TABLES[element], -TABLES[element]])).float()
    assert values.dtype == torch.float32
    assert torch.equal(values.view(torch.int32), expected.view(torch.int32))  # by bits: -0.0 is not 0.0
    assert torch.equal(encode(element, values), codes)
    assert torch.equal(encode(element, values.double()), codes)


@pytest.mark.parametrize("element", TABLES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_values_midpoints_and_their_neighbours(element: str, dtype: torch.dtype) -> None:
    y = interesting(element)
    assert torch.equal(encode(element, torch.from_numpy(y).to(dtype)), torch.from_numpy(nearest(element, y)))


@pytest.mark.parametrize("element", TABLES)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_every_16_bit_value(element: str, dtype: torch.dtype) -> None:
    y = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    y = y[y.isfinite()]
    assert torch.equal(encode(element, y), torch.from_numpy(nearest(element, y.double().numpy())))


@pytest.mark.parametrize("element", TABLES)
def test_float64_is_rounded_once(element: str) -> None:
    middle = torch.from_numpy((TABLES[element][1:] + TABLES[element][:-1]) / 2)
    up, down = middle * (1 + 2.0**-40), middle * (1 - 2.0**-40)  # these round to the midpoint in float32
    lower = torch.arange(len(middle)).to(torch.uint8)
    assert torch.equal(up.float(), middle.float())
    assert torch.equal(encode(element, up), lower + 1)
    assert torch.equal(encode(element, down), lower)


@pytest.mark.parametrize("element", TABLES)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_infinity_saturates_and_nan_stays_local(element: str, dtype: torch.dtype) -> None:
    nan, inf = float("nan"), float("inf")
    codes = encode(element, torch.tensor([1.0, nan, inf, -inf, 1.0, -nan], dtype=dtype))
    top, one = len(TABLES[element]) - 1, int(np.flatnonzero(TABLES[element] == 1.0)[0])
    assert codes[[0, 2, 3, 4]].tolist() == [one, top, top + SIGN[element], one]
    if element == "e4m3":
        assert codes[[1, 5]].tolist() == [0x7F, 0x7F]
    else:
        assert codes[[1, 5]].tolist() == [top, top]


@pytest.mark.parametrize("shape", ((0, 8), (3, 0), (2, 3, 8)))
@pytest.mark.parametrize("element", TABLES)
def test_shapes_and_strides(element: str, shape: tuple[int, ...]) -> None:
    y = torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 4
    codes = encode(element, y)
    assert codes.shape == y.shape and codes.dtype == torch.uint8
    assert torch.equal(encode(element, y.mT).mT, codes)
    assert torch.equal(decode(element, codes.mT).mT, decode(element, codes))


def test_e2m1_packing() -> None:
    codes = torch.arange(256, dtype=torch.int32).reshape(8, 32).remainder(16).to(torch.uint8)
    packed = e2m1.pack(codes)
    assert packed[0, :3].tolist() == [0x10, 0x32, 0x54]  # low nibble = even element
    assert torch.equal(e2m1.unpack(packed), codes)
    assert torch.equal(e2m1.pack(codes.mT.contiguous().mT), packed)
    every = torch.arange(256).to(torch.uint8).reshape(4, 64)
    assert torch.equal(e2m1.pack(e2m1.unpack(every)), every)
    assert torch.equal(e2m1.decode_packed(every), e2m1.decode(e2m1.unpack(every)))
    with pytest.raises(ValueError, match=r"positive multiple of 2, got shape \(2, 3\)"):
        e2m1.pack(torch.zeros(2, 3, dtype=torch.uint8))
    with pytest.raises(TypeError, match=r"torch\.uint8, got torch\.int64"):
        e2m1.pack(torch.zeros(2, 4, dtype=torch.int64))


def test_fp6_packing_is_a_little_endian_bit_stream() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 64, (5, 24), dtype=np.uint8)
    rows = []
    for row in codes:
        word = sum(int(code) << (6 * i) for i, code in enumerate(row))
        rows.append(list(word.to_bytes(18, "little")))
    packed = fp6.pack(torch.from_numpy(codes))
    assert packed.tolist() == rows
    assert torch.equal(fp6.unpack(packed), torch.from_numpy(codes))
    with pytest.raises(ValueError, match="multiple of 4"):
        fp6.pack(torch.zeros(2, 6, dtype=torch.uint8))


def test_e8m0_decode() -> None:
    values = e8m0.decode(torch.arange(256).to(torch.uint8))
    expected = torch.from_numpy(2.0 ** (np.arange(255) - 127.0)).float()
    assert torch.equal(values[:255], expected) and values[0] == 2.0**-127
    assert values[255].isnan()


def _floor_log2(x: float) -> int:
    return int(np.frexp(x)[1]) - 1


def _expected_byte(amax: np.float32, element: str, rule: str) -> int:
    """The rules in float64, where the logarithms are read from exact exponents."""
    top = TABLES[element][-1]
    if amax == 0:
        return 0
    if rule == "rceil":
        quotient = float(np.float32(amax) / np.float32(top))
        if quotient == 0:
            return 0  # below half of the smallest float32
        mantissa, exponent = np.frexp(quotient)
        return int(np.clip((exponent - 1 if mantissa == 0.5 else exponent) + 127, 0, 254))
    value = float(amax)
    if rule == "even":
        # Half of the last kept mantissa place, in the binade of amax.
        mantissa_bits = {"e2m1": 1, "e4m3": 3, "e3m2": 2, "e2m3": 3}[element]
        value += 2.0 ** (max(_floor_log2(value), -126) - mantissa_bits - 1)
    return int(np.clip(_floor_log2(value) - _floor_log2(top) + 127, 0, 254))


@pytest.mark.parametrize("rule", e8m0.RULES)
@pytest.mark.parametrize("element", e8m0.ELEMENTS)
def test_block_exponent(element: str, rule: str) -> None:
    rng = np.random.default_rng(1)
    powers = 2.0 ** np.arange(-149, 128)
    mantissas = np.array([1, 1.5, 1.75, 1.875, 1.9375, 1.25], dtype=np.float32)
    points = (powers[:, None] * mantissas).ravel().astype(np.float32)
    inf = np.float32(np.inf)
    points = np.concatenate([points, np.nextafter(points, inf), np.nextafter(points, np.float32(0))])
    noise = np.abs(rng.standard_normal(500)) * 10.0 ** rng.uniform(-30, 30, 500)
    points = np.concatenate([points, noise.astype(np.float32), np.array([0.0, 3.4e38], dtype=np.float32)])
    points = points[np.isfinite(points)]
    expected = [_expected_byte(p, element, rule) for p in points]
    assert e8m0.encode_block_exponent(torch.from_numpy(points), element, rule).tolist() == expected


def test_unknown_names() -> None:
    amax = torch.ones(3)
    with pytest.raises(ValueError, match=r"element must be one of .*got 'e5m2'"):
        e8m0.encode_block_exponent(amax, "e5m2", "floor")
    with pytest.raises(ValueError, match=r"rule must be one of .*got 'ceil'"):
        e8m0.encode_block_exponent(amax, "e2m1", "ceil")
    calls: list[Callable[[], Tensor]] = [lambda: fp6.encode(amax, "e2m1"), lambda: fp6.decode(amax.byte(), "e2m1")]
    for call in calls:
        with pytest.raises(ValueError, match="got 'e2m1'"):
            call()
