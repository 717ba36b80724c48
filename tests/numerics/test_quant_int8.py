"""int8 against compressed-tensors (bit for bit: codes, bf16 scale, values) and against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from paths import DATA
from safetensors.torch import load_file
from torch import Tensor

from torch_moe_ops.numerics import int8

V = load_file(DATA / "vectors" / "fp8_block.safetensors")


def rows(seed: int, count: int = 30, k: int = 64) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, k, generator=g) * 10.0 ** torch.linspace(-38, 36, count)[:, None]
    x[5], x[6] = 0.0, -0.0
    return x


def test_channel_is_compressed_tensors() -> None:
    codes, scale = int8.quantize_weight_channel(V["input/weight_bf16"], torch.bfloat16)
    assert torch.equal(codes, V["ct/weight_bf16/int8_codes"])
    assert torch.equal(scale[:, None], V["ct/weight_bf16/int8_scale"])
    assert torch.equal(int8.dequantize(codes, scale), V["ct/weight_bf16/int8_dequant"])


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_per_token_is_a_division_and_a_rounding(dtype: torch.dtype) -> None:
    x = rows(1).to(dtype)
    codes, scale = int8.quantize_int8(x)
    wide = x.float().numpy()
    expected = np.abs(wide).max(1) / np.float32(127)
    expected[expected == 0] = 1
    assert torch.equal(scale, torch.from_numpy(expected))
    quotient = np.rint(wide / expected[:, None]).clip(-127, 127).astype(np.int8)
    assert torch.equal(codes, torch.from_numpy(quotient))
    assert scale[5:7].tolist() == [1.0, 1.0] and not codes[5:7].any()


def test_weights_use_minus_128_and_activations_do_not() -> None:
    x = torch.tensor([[-255.0, 255.0, 127.0, 3.0, -1.0, 5.0, 1.0, 0.0]])
    codes, scale = int8.quantize_weight_channel(x)  # scale 2: 127.5 and -127.5 round to even
    assert scale.tolist() == [2.0] and codes.tolist() == [[-128, 127, 64, 2, 0, 2, 0, 0]]
    codes, scale = int8.quantize_int8(x / 255 * 127)
    assert scale.tolist() == [1.0] and codes[0, :2].tolist() == [-127, 127]
    codes, _ = int8.quantize_int8(torch.tensor([[-1000.0, 1000.0]]), torch.tensor(1.0))
    assert codes.tolist() == [[-127, 127]]


def test_static_scale() -> None:
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, 3.49]])
    codes, scale = int8.quantize_int8(x, torch.tensor(1.0))
    assert codes.tolist() == [[0, 2, 2, 0, 3]] and scale.tolist() == [1.0]
    codes, scale = int8.quantize_int8(x.repeat(2, 1), torch.tensor([2.0, 4.0]))
    assert codes.tolist() == [[1, 3, 5, -1, 7], [2, 6, 10, -2, 14]] and scale.tolist() == [0.5, 0.25]


def test_groups_and_zero_points() -> None:
    w = rows(2, count=12).view(4, 3, 64)[:2]
    codes, scale = int8.quantize_weight_group(w, 16)
    assert scale.shape == (2, 3, 4)
    for g in range(4):
        alone = int8.quantize_weight_channel(w[..., 16 * g : 16 * g + 16])
        assert torch.equal(alone[0], codes[..., 16 * g : 16 * g + 16]) and torch.equal(alone[1], scale[..., g])
    zero = torch.arange(24, dtype=torch.int8).view(2, 3, 4)
    wide = (codes.double() - zero.double().repeat_interleave(16, -1)) * scale.double().repeat_interleave(16, -1)
    assert torch.equal(int8.dequantize_group(codes, scale, zero, torch.float64), wide)
    assert torch.equal(int8.dequantize_group(codes, scale, zero), wide.float())
    per_channel = int8.dequantize(codes, scale[..., 0], zero[..., 0])
    assert torch.equal(per_channel[..., :16], wide.float()[..., :16])


def test_shapes_strides_and_a_nan_row() -> None:
    x = rows(3)
    codes, scale = int8.quantize_int8(x)
    again = int8.quantize_int8(x.T.contiguous().T)
    assert torch.equal(again[0], codes) and torch.equal(again[1], scale)
    assert [t.shape for t in int8.quantize_int8(x[:0])] == [(0, 64), (0,)]
    x[2, 2] = float("nan")
    keep = torch.arange(len(x)) != 2
    dirty = int8.quantize_int8(x)
    assert torch.equal(dirty[0][keep], codes[keep]) and torch.equal(dirty[1][keep], scale[keep])
    assert dirty[1][2].isnan() and not dirty[0][2].any()


@pytest.mark.parametrize("bad", (float("nan"), float("inf"), -float("inf")))
def test_a_calibrated_row_without_nan_says_so_in_its_scale(bad: float) -> None:
    x = rows(3)
    codes, scale = int8.quantize_int8(x, torch.tensor(20.0))
    x[2, 2] = bad
    dirty = int8.quantize_int8(x, torch.tensor(20.0))
    codes[2, 2] = 0 if bad != bad else 127 if bad > 0 else -127
    assert torch.equal(dirty[0], codes)
    assert dirty[1][2].isnan() and (dirty[1][torch.arange(len(x)) != 2] == scale[0]).all()


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"K of w must be a positive multiple of 16, got shape \(2, 24\)"):
        int8.quantize_weight_group(torch.ones(2, 24), 16)
    with pytest.raises(TypeError, match=r"codes must have dtype torch\.int8, got torch\.uint8"):
        int8.dequantize(torch.ones(2, 4).byte(), torch.ones(2))
    codes, scale = int8.quantize_weight_group(torch.ones(2, 32), 16)
    with pytest.raises(ValueError, match=r"a multiple of its 3 scales, got shape \(2, 32\)"):
        int8.dequantize_group(codes, torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"zero_point must have shape \(2, 2\), got \(2, 1\)"):
        int8.dequantize_group(codes, scale, torch.ones(2, 1))
    with pytest.raises(TypeError, match=r"gscale must have dtype torch\.float32"):
        int8.quantize_int8(torch.ones(2, 4), torch.tensor(1))


def test_weights_with_zero_points():
    """The 256 codes from the smallest to the largest value, zero among them; value = (code - zero point) * scale."""
    w = torch.stack([torch.linspace(-1, 4, 64), torch.linspace(1, 2, 64), -torch.linspace(1, 2, 64), torch.zeros(64)])
    codes, scale, zero = int8.quantize_weight_asymmetric(w, 32)
    assert (codes.dtype, zero.dtype, scale.shape, zero.shape) == (torch.int8, torch.int8, (4, 2), (4, 2))
    ends = torch.tensor([[w[0, 31] + 1, 4.0], [w[1, 31], 2.0], [-w[2, 31], 2.0]])  # from zero, where all have one sign
    torch.testing.assert_close(scale[:3], ends / 255)
    assert zero[1].tolist() == [-128, -128] and zero[2].tolist() == [127, 127] and zero[3].tolist() == [0, 0]
    again = int8.dequantize_group(codes, scale, zero)
    assert ((again - w).abs() <= scale.repeat_interleave(32, 1) * 0.5001).all()
    assert (again[3] == 0).all()
    with pytest.raises(ValueError, match="K of w must be a positive multiple of 48"):
        int8.quantize_weight_asymmetric(w, 48)
