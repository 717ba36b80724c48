"""NVFP4 quantizers against a scalar numpy version of the algorithm, and against bounds in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from torch_moe_ops.numerics import e2m1, nvfp4

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
E4M3 = np.array([(c % 8 / 8 + (c >= 8)) * 2.0 ** (max(c // 8, 1) - 7) for c in range(127)])
F32 = np.float32
SIXTH = np.uint32(0x3E2AAAAB).view(F32)  # fl(1 / 6)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def nearest_code(value: np.float32, table: np.ndarray) -> int:
    """Index of the nearest entry, ties to the even index; distances are exact in float64. NaN saturates."""
    if np.isnan(value):
        return len(table) - 1
    distance = np.abs(table.astype(np.float64) - min(float(value), float(table[-1])))
    candidates = np.flatnonzero(distance == distance.min())
    return int(next((c for c in candidates if c % 2 == 0), candidates[0]))


def quantize_block(x: np.ndarray, gscale: np.float32) -> tuple[list[int], int]:
    """One block of 16 float32 values, one rounding a line: codes (one each), and the e4m3 byte."""
    amax = np.float32(np.max(np.abs(x)))
    if not np.isfinite(amax):
        return [7] * 16, 0x7F
    wanted = np.float32(amax * SIXTH)
    wanted = np.float32(gscale * wanted)
    byte = nearest_code(min(wanted, np.float32(448)), E4M3)
    scale = np.float32(E4M3[byte])
    factor = np.float32(0)
    if byte:
        inverse = np.float32(np.float32(1) / gscale)
        factor = min(np.float32(np.float32(1) / np.float32(scale * inverse)), np.finfo(np.float32).max)
    scaled = [np.float32(v * factor) for v in x]
    return [nearest_code(np.abs(y), E2M1) + 8 * int(np.signbit(y) and not np.isnan(y)) for y in scaled], byte


def assert_same_as_scalar(x: Tensor, gscale: Tensor) -> None:
    codes, scale = nvfp4.quantize_activation(x, gscale)
    rows = x.float().numpy().reshape(-1, x.shape[-1])
    factors = gscale.expand(x.shape[:-1]).reshape(-1).numpy()
    with np.errstate(all="ignore"):
        expected = [quantize_block(b, gs) for r, gs in zip(rows, factors, strict=True) for b in r.reshape(-1, 16)]
    assert scale.view(torch.uint8).flatten().tolist() == [byte for _, byte in expected]
    assert e2m1.unpack(codes).reshape(-1, 16).tolist() == [row for row, _ in expected]


def random_rows(seed: int, rows: int = 24, k: int = 64) -> Tensor:
    """Rows whose blocks differ in size by many powers of two, with zero blocks and single values among them."""
    g = generator(seed)
    x = torch.randn(rows, k // 16, 16, generator=g)
    x *= 2.0 ** torch.randint(-14, 3, (rows, k // 16, 1), generator=g)
    x[0, 0] = 0.0
    x[1, 1] = -0.0
    x[2, 0, 1:] = 0.0
    return x.flatten(1)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.parametrize("gscale", ("dynamic", "static", "small", "large"))
def test_random_rows_equal_the_scalar_version(dtype: torch.dtype, gscale: str) -> None:
    x = random_rows(3).to(dtype)
    amax = x.float().abs().amax()
    factors = {"static": 2688 / amax, "small": 2688 / amax / 900, "large": 2688 / amax * 7.3}
    assert_same_as_scalar(x, nvfp4.dynamic_gscale(x) if gscale == "dynamic" else factors[gscale])


def adversarial_blocks() -> Tensor:
    """Blocks for gscale 1: the scale of each is fl(amax / 6), near every e4m3 value and midpoint."""
    middles = np.concatenate([E4M3, (E4M3[1:] + E4M3[:-1]) / 2]) * 6
    points = middles.astype(np.float32)
    inf = np.float32(np.inf)
    points = np.concatenate([points, np.nextafter(points, inf), np.nextafter(points, np.float32(0))])
    points = np.concatenate([points, np.array([1e-45, 1e-38, 6 * 2**-10, 2688, 2689, 1e5, 3e38], dtype=np.float32)])
    ratios = [1, -0.75, 0.5, 0.25, 1 / 6, -1 / 12, 1 / 3, 5 / 6, 5 / 12, 7 / 12, 0.0, -0.0, 1e-6, -1e-6, 0.1, 2 / 3]
    return torch.from_numpy(points[:, None] * np.array(ratios, dtype=np.float32))


def test_adversarial_blocks_equal_the_scalar_version() -> None:
    assert_same_as_scalar(adversarial_blocks(), torch.tensor(1.0))


def neighbours(x: np.ndarray, reach: int) -> np.ndarray:
    """float32 values up to `reach` places around each element: [..., 2 * reach + 1]."""
    steps = np.arange(-reach, reach + 1, dtype=np.int32)
    return (x.astype(F32).view(np.int32)[..., None] + steps).view(F32)


def test_order_of_the_two_products_shows() -> None:
    """fl(gscale * fl(v * c)), never fl(fl(gscale * v) * c): they lie on different sides of an e4m3 midpoint."""
    rng = np.random.default_rng(0)
    middle = rng.choice((E4M3[9:] + E4M3[8:-1]) / 2, 4000).astype(F32)
    gscale = rng.uniform(1, 900, 4000).astype(F32)
    amax = neighbours(middle / (gscale * SIXTH), 3)
    right, wrong = gscale[:, None] * (amax * SIXTH), (gscale[:, None] * amax) * SIXTH
    chosen = (right <= middle[:, None]) != (wrong <= middle[:, None])
    assert chosen.sum() > 100
    row, place = np.nonzero(chosen)
    x = torch.from_numpy(amax[row, place])[:, None] * torch.linspace(-1, 1, 16)
    assert_same_as_scalar(x, torch.from_numpy(gscale[row]))


def test_order_of_the_two_reciprocals_shows() -> None:
    """r = fl(1 / fl(S * fl(1 / gscale))), never fl(1 / fl(S / gscale)) or fl(gscale / S): ties come out otherwise."""
    rng = np.random.default_rng(1)
    scale = rng.choice(E4M3[64:], 4000).astype(F32)
    gscale = rng.uniform(1, 900, 4000).astype(F32)
    right = F32(1) / (scale * (F32(1) / gscale))
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=F32)
    x = neighbours((ties / right[:, None])[:, rng.integers(0, 7, 3)], 2).reshape(4000, 15)
    for wrong in (F32(1) / (scale / gscale), gscale / scale):
        codes, others = (e2m1.encode(torch.from_numpy(x * r[:, None])) for r in (right, wrong))
        rows = (codes != others).any(1).nonzero()[:200, 0]
        assert len(rows) == 200
        largest = torch.from_numpy(scale * 6 / gscale)[:, None]  # makes the block scale what it is
        block = torch.cat((largest, torch.from_numpy(x)), 1)[rows]
        assert_same_as_scalar(block, torch.from_numpy(gscale)[rows])
        stored = nvfp4.quantize_activation(block, torch.from_numpy(gscale)[rows])[1]
        assert torch.equal(stored.float()[:, 0], torch.from_numpy(scale)[rows])


@pytest.mark.parametrize("gscale", (1e-38, 3e-20, 1e20, 3e38))
def test_extreme_gscale(gscale: float) -> None:
    """1 / gscale may be subnormal, and its reciprocals beyond the largest float: zeros must stay zeros all the same."""
    x = random_rows(5) * (0.05 / gscale if gscale < 1e30 else 1e-37)
    assert x.isfinite().all()
    _, scale = nvfp4.quantize_activation(x, torch.tensor(gscale))
    assert not scale.float().isnan().any()
    assert not scale.float()[0, 0]
    assert_same_as_scalar(x, torch.tensor(gscale))


def test_ties_of_every_element() -> None:
    """With amax 6 and gscale 1 the factor is exactly 1: the sixteen values are the ties and zeros themselves."""
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    x = torch.tensor([[6.0, 0.0, *ties, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -0.0]])
    codes, scale = nvfp4.quantize_activation(x, torch.tensor(1.0))
    assert scale.float().item() == 1.0
    assert e2m1.unpack(codes).tolist() == [[7, 0, 0, 2, 2, 4, 4, 6, 6, 8, 10, 10, 12, 12, 14, 8]]


def test_scale_underflow_and_saturation() -> None:
    """fl(amax * fl(1/6)) = 2^-10 is lost, the next float gives 2^-9; beyond 448 codes saturate at 6."""
    lost = torch.full((1, 16), 6 * 2.0**-10)
    codes, scale = nvfp4.quantize_activation(torch.cat([lost, lost * (1 + 2.0**-20)]), torch.tensor(1.0))
    assert scale.float().flatten().tolist() == [0.0, 2.0**-9]
    assert codes[0].tolist() == [0] * 8 and codes[1].tolist() == [0x55] * 8
    codes, scale = nvfp4.quantize_activation(-lost, torch.tensor(1.0))
    assert codes.tolist() == [[0x88] * 8]
    codes, scale = nvfp4.quantize_activation(torch.full((1, 16), 1e4), torch.tensor(1.0))
    assert scale.float().item() == 448.0 and codes.tolist() == [[0x77] * 8]


@pytest.mark.parametrize("bad", (float("nan"), float("inf"), -float("inf")))
def test_a_bad_row_does_not_disturb_the_others(bad: float) -> None:
    x = random_rows(7)
    gscale = nvfp4.dynamic_gscale(x)
    clean_codes, clean_scale = nvfp4.quantize_activation(x, gscale)
    x[4, 5] = bad
    keep = torch.arange(len(x)) != 4
    dirty = nvfp4.dynamic_gscale(x)
    assert torch.equal(dirty[keep], gscale[keep])
    for factors in (gscale, dirty):
        codes, scale = nvfp4.quantize_activation(x, factors)
        assert torch.equal(codes[keep], clean_codes[keep])
        assert torch.equal(scale.view(torch.uint8)[keep], clean_scale.view(torch.uint8)[keep])
    assert dirty[4].isnan()
    codes, scale = nvfp4.quantize_activation(x, gscale)
    assert scale.view(torch.uint8)[4, 0] == 0x7F and (codes[4, :8] == 0x77).all()
    assert torch.equal(codes[4, 8:], clean_codes[4, 8:])
    assert_same_as_scalar(x, gscale)
    assert nvfp4.quantize_activation(x, dirty)[1][4].float().isnan().all()


def test_dynamic_gscale() -> None:
    x = torch.tensor([[0.0] * 16, [-0.0] * 16, [3.0] * 15 + [-7.0], [1e-32] * 16])
    expected = [1.0, 1.0, float(np.float32(2688) / np.float32(7)), float(np.float32(2688) / np.float32(1e-32))]
    assert nvfp4.dynamic_gscale(x).tolist() == expected
    assert nvfp4.dynamic_gscale(x[:, None].bfloat16()).shape == (4, 1)
    # One division: 2688 * fl(1 / amax) differs from it for about a third of all values.
    amax = torch.linspace(1, 2, 1001)
    divided = torch.from_numpy(np.float32(2688) / amax.numpy())
    assert torch.equal(nvfp4.dynamic_gscale(amax[:, None]), divided)
    assert not torch.equal(2688 * amax.reciprocal(), divided)


def test_error_is_within_half_a_step() -> None:
    """In float64: |x - code * S / gscale| is at most half the gap of e2m1 around it, or x saturates."""
    x = random_rows(11, rows=64)
    gscale = nvfp4.dynamic_gscale(x)
    codes, scale = nvfp4.quantize_activation(x, gscale)
    back = nvfp4.dequantize(codes, scale, gscale.double().reciprocal(), dtype=torch.float64)
    unit = (scale.double() / gscale.double()[:, None]).repeat_interleave(16, -1)
    y = (x.double() / unit.clamp_min(1e-300)).abs()
    step = torch.where(y < 2, 0.5, torch.where(y < 4, 1.0, 2.0))
    fits = (unit > 0) & (y <= 6)
    assert fits.float().mean() > 0.5
    error = ((x.double() - back).abs() / unit.clamp_min(1e-300))[fits]
    assert (error <= step[fits] / 2 * (1 + 1e-6)).all()
    assert (back.abs() <= 6 * unit * (1 + 1e-12)).all() and (back[unit == 0] == 0).all()


@pytest.mark.parametrize("shape", ((0, 32), (3, 0, 16), (2, 3, 48)))
def test_shapes_and_strides(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=generator(1))
    gscale = nvfp4.dynamic_gscale(x)
    codes, scale = nvfp4.quantize_activation(x, gscale)
    assert codes.shape == (*shape[:-1], shape[-1] // 2) and codes.dtype == torch.uint8
    assert scale.shape == (*shape[:-1], shape[-1] // 16) and scale.dtype == torch.float8_e4m3fn
    strided = x.mT.contiguous().mT
    again = nvfp4.quantize_activation(strided, nvfp4.dynamic_gscale(strided))
    assert torch.equal(again[0], codes) and torch.equal(again[1].view(torch.uint8), scale.view(torch.uint8))
    assert nvfp4.dequantize(codes, scale, gscale.reciprocal()).shape == shape
    weights = nvfp4.quantize_weight(strided)
    assert weights[0].shape == codes.shape and weights[2].shape == shape[:-2]


def test_one_gscale_per_row() -> None:
    x = random_rows(13, rows=6).view(2, 3, 64)
    gscale = torch.rand(2, 3, generator=generator(2)) * 100 + 1
    codes, scale = nvfp4.quantize_activation(x, gscale)
    for i in range(2):
        for j in range(3):
            alone = nvfp4.quantize_activation(x[i, j], gscale[i, j])
            assert torch.equal(alone[0], codes[i, j]) and torch.equal(alone[1].float(), scale[i, j].float())


def test_weight_of_zeros_and_of_tiny_values() -> None:
    w = torch.zeros(3, 4, 32)
    w[1, 0, 0], w[2] = -1.0, 1e-44
    codes, scale, scale_2 = nvfp4.quantize_weight(w)
    assert scale_2[0] == 1.0 and scale_2[1] == float(np.float32(1) / np.float32(2688))
    assert (scale[0].float() == 1.0).all() and not codes[0].any()
    values = nvfp4.dequantize(codes, scale, scale_2)
    assert values.isfinite().all() and values[1, 0, 0] == -1.0 and values[1].count_nonzero() == 1


def test_parameters_leave_no_gradient() -> None:
    w = torch.nn.Parameter(torch.randn(4, 32, generator=generator(8)))
    plain = nvfp4.quantize_weight(w.detach())
    for ours, expected in zip(nvfp4.quantize_weight(w), plain, strict=True):
        assert not ours.requires_grad and torch.equal(ours.float(), expected.float())
    assert not nvfp4.dynamic_gscale(w).requires_grad


def test_given_scale_2_broadcasts() -> None:
    w = torch.randn(3, 8, 32, generator=generator(4))
    one = nvfp4.quantize_weight(w, torch.tensor(0.001))
    assert one[2].shape == (3,)
    for e in range(3):
        alone = nvfp4.quantize_weight(w[e], torch.tensor(0.001))
        assert torch.equal(alone[0], one[0][e]) and torch.equal(alone[1].float(), one[1][e].float())


def test_alpha_lines_up_with_the_first_dimensions() -> None:
    codes, scale, scale_2 = nvfp4.quantize_weight(torch.randn(2, 2, 32, generator=generator(6)))
    plain = nvfp4.dequantize(codes, scale)
    alpha = torch.tensor([2.0, 0.5])
    assert torch.equal(nvfp4.dequantize(codes, scale, alpha), plain * alpha[:, None, None])
    assert torch.equal(nvfp4.dequantize(codes[0], scale[0], alpha), plain[0] * alpha[:, None])
    exact = plain.double() * scale_2.double()[:, None, None]
    assert torch.equal(nvfp4.dequantize(codes, scale, scale_2, dtype=torch.float64), exact)


def test_errors() -> None:
    x, one = torch.zeros(2, 24), torch.tensor(1.0)
    with pytest.raises(ValueError, match=r"K of x must be a positive multiple of 16, got shape \(2, 24\)"):
        nvfp4.quantize_activation(x, one)
    with pytest.raises(ValueError, match=r"K of w must be a positive multiple of 16, got shape \(2, 24\)"):
        nvfp4.quantize_weight(x)
    with pytest.raises(ValueError, match=r"gscale must have shape \(\) or \(2,\) \(one per row\), got \(3,\)"):
        nvfp4.quantize_activation(torch.zeros(2, 16), torch.ones(3))
    with pytest.raises(TypeError, match=r"gscale must have dtype torch\.float32, got torch\.float64"):
        nvfp4.quantize_activation(torch.zeros(2, 16), one.double())
    with pytest.raises(TypeError, match=r"x must have one of the dtypes .*got torch\.float64"):
        nvfp4.quantize_activation(torch.zeros(2, 16).double(), one)
    with pytest.raises(ValueError, match=r"w must have shape \[\.\.\., N, K\], got \(16,\)"):
        nvfp4.quantize_weight(torch.zeros(16))
    with pytest.raises(ValueError, match=r"scale_2 must be broadcastable to \(2,\), got shape \(3,\)"):
        nvfp4.quantize_weight(torch.zeros(2, 4, 16), torch.ones(3))
    codes, scale, _ = nvfp4.quantize_weight(torch.zeros(4, 32))
    with pytest.raises(ValueError, match=r"scale must have shape \(4, 2\), got \(4, 1\)"):
        nvfp4.dequantize(codes, scale[:, :1])
    with pytest.raises(ValueError, match=r"alpha must have at most 2 dimensions, got shape \(1, 1, 1\)"):
        nvfp4.dequantize(codes, scale, torch.ones(1, 1, 1))
