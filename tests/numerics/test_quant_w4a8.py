"""Weights that are rounded to e4m3 under one power of two per row: NVFP4 and MXFP4 codes, policies packed and folded."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from paths import DATA
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.numerics import e4m3, mx, w4a8

E4M3 = sorted(
    {Fraction(float(v)) for v in e4m3.decode(torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn))}
)


def random_codes(rows: int, k: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, k // 2), generator=g, dtype=torch.uint8)


def random_exponents(rows: int, k: int, first: int, last: int) -> Tensor:
    g = torch.Generator().manual_seed(rows + first)
    return torch.randint(first, last + 1, (rows, k // 32), generator=g, dtype=torch.uint8)


def by_the_definition(row: list[Fraction]) -> tuple[int, list[Fraction]]:
    """x and w8 of a row, by exact arithmetic; ties go to the e4m3 number whose code is even."""
    largest = max(abs(w) for w in row)
    if not largest:
        return 0, row
    x = -400
    while largest > 448 * Fraction(2) ** x:
        x += 1
    rounded = []
    for w in row:
        magnitude = abs(w) / Fraction(2) ** x
        code = min(range(len(E4M3)), key=lambda i: (abs(E4M3[i] - magnitude), i % 2))
        rounded.append(E4M3[code] * (-1 if w < 0 else 1))
    return x, rounded


@pytest.mark.parametrize(("first", "last"), [(120, 126), (107, 121), (90, 127), (0, 15), (2, 140), (150, 160)])
def test_mxfp4_by_the_definition(first: int, last: int) -> None:
    """Also rows whose weights are subnormal in float32."""
    codes, scale = random_codes(6, 96), random_exponents(6, 96, first, last)
    codes[4] &= 0x88
    values = [[Fraction(float(v)) for v in row] for row in mx.dequantize_mx(codes, scale, "e2m1", torch.float64)]
    rounded, exponent = w4a8.round_weights(codes, scale)
    dequantized = w4a8.dequantize(codes, scale, torch.float64)
    for row, found, x, back in zip(
        values, rounded.float().tolist(), exponent.tolist(), dequantized.tolist(), strict=True
    ):
        expected_x, expected = by_the_definition(row)
        assert x == expected_x
        assert [Fraction(v) for v in found] == expected
        assert [Fraction(v) for v in back] == [v * Fraction(2) ** x for v in expected]


@pytest.mark.parametrize("largest", [0x7, 0x6])  # 6, 4
@pytest.mark.parametrize("low", range(1, 8))
def test_mxfp4_is_exact_down_to_half_of_a_scale_14_binades_below(largest: int, low: int) -> None:
    """A row's unit 2^x is 2^-6 times its largest scale, so that half of a scale of 2^-8 units is 2^-9: 15 binades of scales,
    from 2^6 to 2^-8 units. One below, odd multiples of a half are rounded, all other codes are not."""
    codes = torch.zeros(2, 32, dtype=torch.uint8)
    codes[:, 0], codes[:, 16:] = largest, low << 4 | low | 8
    scale = torch.tensor([[127, 127 - 14], [127, 127 - 15]], dtype=torch.uint8)
    exact, packed = mx.dequantize_mx(codes, scale, "e2m1"), w4a8.dequantize(codes, scale)
    assert torch.equal(exact[0], packed[0])
    assert torch.equal(exact[1], packed[1]) == (low not in (1, 3))  # 0.5 and 1.5


def test_mxfp4_rows_within_reach_are_exact() -> None:
    codes, scale = random_codes(64, 512), random_exponents(64, 512, 110, 124)
    codes[:, 0], scale[:, 0] = 0x77, 124
    assert torch.equal(w4a8.dequantize(codes, scale), mx.dequantize_mx(codes, scale, "e2m1"))


@pytest.mark.parametrize("name", ["gpt_oss_mxfp4", "qwen3_moe_ct_mxfp4"])
def test_third_party_mxfp4_weights_are_exact(name: str) -> None:
    raw = moe.load_experts(DATA / "checkpoints" / name, 0)
    for codes, scale in ((raw.w13, raw.w13_scale), (raw.w2, raw.w2_scale)):
        assert scale is not None and scale.dtype == torch.uint8
        assert torch.equal(w4a8.dequantize(codes, scale), mx.dequantize_mx(codes, scale, "e2m1"))


def test_nvfp4_by_the_definition() -> None:
    codes = random_codes(4, 64)
    g = torch.Generator().manual_seed(1)
    scale = torch.randint(0, 127, (4, 4), generator=g, dtype=torch.uint8).view(torch.float8_e4m3fn)
    rounded, exponent = w4a8.round_weights(codes, scale)
    for row, found, x in zip(
        w4a8.decode(codes, scale).tolist(), rounded.float().tolist(), exponent.tolist(), strict=True
    ):
        expected_x, expected = by_the_definition([Fraction(v) for v in row])
        assert x == expected_x and [Fraction(v) for v in found] == expected
