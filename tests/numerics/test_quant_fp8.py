"""fp8 against ModelOpt, transformers and compressed-tensors, and against float32 numpy.

| compared                                                       | how                                               |
| ModelOpt block, per tensor, 1x128 groups                       | scales, codes and values bit for bit              |
| transformers block                                             | codes bit for bit but one element, where its      |
|                                                                | x * (448 / amax) rounds otherwise; scale within   |
|                                                                | 1 ulp; values bit for bit                         |
| compressed-tensors block and channel (bf16 scale and quotient) | scale bit for bit once rounded, values bit for bit |
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from paths import DATA
from safetensors.torch import load_file
from torch import Tensor

from torch_moe_ops.numerics import e4m3, fp8

V = load_file(DATA / "vectors" / "fp8_block.safetensors")


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def ulps(a: Tensor, b: Tensor) -> int:
    """Largest distance of positive float32 values."""
    return int((a.contiguous().view(torch.int32) - b.contiguous().view(torch.int32)).abs().max())


@pytest.mark.parametrize("case", ("main_bf16", "main_fp32"))
def test_block_is_modelopt(case: str) -> None:
    theirs = V[f"modelopt/{case}/codes"]
    w = V[f"input/{case}"][:, : theirs.shape[1]]  # it cannot quantize the all-zero tile at the right edge
    codes, scale = fp8.quantize_weight_block(w)
    assert same_bits(codes, theirs) and torch.equal(scale, V[f"modelopt/{case}/scale_inv"])
    assert torch.equal(fp8.dequantize_block(codes, scale), V[f"modelopt/{case}/dequant"])


@pytest.mark.parametrize("case", ("main_bf16", "main_fp32"))
def test_block_is_transformers(case: str) -> None:
    w, theirs, scale_inv = (
        V[k] for k in (f"input/{case}", f"transformers/{case}/codes", f"transformers/{case}/scale_inv")
    )
    codes, scale = fp8.quantize_weight_block(w)
    assert ulps(scale, scale_inv) <= 1
    distance = (codes.view(torch.uint8).int() - theirs.view(torch.uint8).int()).abs()
    assert distance.max() <= 1 and distance.sum() <= (0 if case == "main_bf16" else 1)
    assert torch.equal(fp8.dequantize_block(theirs, scale_inv), V[f"transformers/{case}/dequant"])


def test_all_zero_tile_has_scale_one() -> None:
    w = V["input/main_bf16"]
    assert not w[128:, 256:].any() and w.shape == (168, 304)  # a partial tile at both edges
    codes, scale = fp8.quantize_weight_block(w)
    assert scale.shape == (2, 3) and scale[1, 2] == 1.0 == V["transformers/main_bf16/scale_inv"][1, 2]
    assert not codes[128:, 256:].float().any()


@pytest.mark.parametrize("case", ("main_bf16", "main_fp32"))
def test_block_of_compressed_tensors(case: str) -> None:
    theirs, scale = V[f"ct/{case}/codes"], V[f"ct/{case}/scale"]
    assert torch.equal(fp8.dequantize_block(theirs, scale), V[f"ct/{case}/dequant"])
    _, ours = fp8.quantize_weight_block(V[f"input/{case}"])
    zero_tile = ours == 1.0  # where that tool writes the epsilon of bf16
    assert torch.equal(ours.to(scale.dtype)[~zero_tile], scale[~zero_tile])
    assert int(zero_tile.sum()) == (case == "main_bf16")


def test_activation_groups_are_modelopt() -> None:
    codes, scale = fp8.quantize_fp8_group(V["input/act_bf16"])
    assert same_bits(codes, V["modelopt/act_bf16/codes"]) and torch.equal(scale, V["modelopt/act_bf16/scale"])
    assert torch.equal(fp8.dequantize_group(codes, scale), V["modelopt/act_bf16/dequant"])


def test_per_tensor_is_modelopt() -> None:
    codes, scale = fp8.quantize_weight_tensor(V["input/weight_bf16"])
    assert same_bits(codes, V["modelopt/weight_bf16/tensor_codes"])
    assert torch.equal(scale, V["modelopt/weight_bf16/tensor_scale"])
    assert torch.equal(fp8.dequantize(codes, scale), V["modelopt/weight_bf16/tensor_dequant"])


def test_channel_of_compressed_tensors() -> None:
    w, theirs, scale = V["input/weight_bf16"], V["ct/weight_bf16/channel_codes"], V["ct/weight_bf16/channel_scale"]
    codes, ours = fp8.quantize_weight_channel(w)
    assert torch.equal(ours.bfloat16()[:, None], scale)
    assert torch.equal(fp8.dequantize(theirs, scale), V["ct/weight_bf16/channel_dequant"])
    # Its quotient is bf16, so some codes differ, by one; with that quotient the encoder gives its codes.
    assert same_bits(e4m3.encode(w / scale), theirs)
    assert ((codes.view(torch.uint8).int() - theirs.view(torch.uint8).int()).abs() <= 1).all()


def rows(seed: int) -> Tensor:
    x = (
        torch.randn(40, 72, generator=torch.Generator().manual_seed(seed))
        * 10.0 ** torch.linspace(-39, 36, 40)[:, None]
    )
    x[7], x[8] = 0.0, -0.0
    return x


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_per_token_is_two_divisions(dtype: torch.dtype) -> None:
    x = rows(1).to(dtype)
    codes, scale = fp8.quantize_fp8(x)
    wide = x.float().numpy()
    expected = np.abs(wide).max(1) / np.float32(448)
    expected[expected == 0] = 1
    assert torch.equal(scale, torch.from_numpy(expected))
    quotient = torch.from_numpy(np.clip(wide / expected[:, None], -448, 448))
    assert same_bits(codes, quotient.to(torch.float8_e4m3fn))
    assert scale[7] == 1.0 and codes.view(torch.uint8)[7:9, 0].tolist() == [0, 128]


def test_static_scale() -> None:
    x = torch.tensor([[1.0, -3.0, 1e6, float("nan"), 0.001, -float("inf")]])
    codes, scale = fp8.quantize_fp8(x, torch.tensor(3.7))
    expected = torch.tensor([[3.7, np.float32(-3.0) * np.float32(3.7), 448.0, float("nan"), 0.0037, float("nan")]])
    assert same_bits(codes, expected.to(torch.float8_e4m3fn))
    assert scale.shape == () and scale == torch.tensor(3.7).reciprocal()
    per_row = fp8.quantize_fp8(x.repeat(2, 1), torch.tensor([3.7, 1.0]))
    assert same_bits(per_row[0][:1], codes) and per_row[1].shape == (2,)


@pytest.mark.parametrize("k", (128, 200, 40))
def test_groups_may_be_partial(k: int) -> None:
    x = torch.randn(2, 3, k, generator=torch.Generator().manual_seed(k))
    codes, scale = fp8.quantize_fp8_group(x)
    assert scale.shape == (2, 3, -(-k // 128))
    for g in range(scale.shape[-1]):
        columns = slice(128 * g, 128 * (g + 1))
        alone = fp8.quantize_fp8(x[..., columns])
        assert same_bits(alone[0], codes[..., columns]) and torch.equal(alone[1], scale[..., g])
    assert fp8.dequantize_group(codes, scale).shape == x.shape


def test_tiles_of_batched_and_strided_weights() -> None:
    w = torch.randn(2, 20, 24, generator=torch.Generator().manual_seed(5))
    codes, scale = fp8.quantize_weight_block(w, (8, 16))
    assert scale.shape == (2, 3, 2)
    for r in range(3):
        for c in range(2):
            tile = w[:, 8 * r : 8 * r + 8, 16 * c : 16 * c + 16]
            alone = fp8.quantize_weight_tensor(tile)
            assert torch.equal(alone[1], scale[:, r, c])
            assert same_bits(alone[0], codes[:, 8 * r : 8 * r + 8, 16 * c : 16 * c + 16])
    again = fp8.quantize_weight_block(w.mT.contiguous().mT, (8, 16))
    assert same_bits(again[0], codes) and torch.equal(again[1], scale)
    exact = codes.double() * scale.double().repeat_interleave(8, 1)[:, :20].repeat_interleave(16, 2)[..., :24]
    assert torch.equal(fp8.dequantize_block(codes, scale, (8, 16), torch.float64), exact)


def test_scales_of_every_granularity_line_up() -> None:
    w = torch.randn(3, 3, 16, generator=torch.Generator().manual_seed(6))
    codes, scale = fp8.quantize_weight_tensor(w)
    assert torch.equal(fp8.dequantize(codes, scale), codes.float() * scale[:, None, None])
    codes, scale = fp8.quantize_weight_channel(w)
    assert torch.equal(fp8.dequantize(codes, scale), codes.float() * scale[..., None])
    assert torch.equal(fp8.dequantize(codes, scale[..., None]), fp8.dequantize(codes, scale))


def test_nan_row_and_no_rows() -> None:
    x = rows(2)
    clean = fp8.quantize_fp8(x)
    x[3, 3] = float("nan")
    keep = torch.arange(len(x)) != 3
    codes, scale = fp8.quantize_fp8(x)
    assert same_bits(codes[keep], clean[0][keep]) and torch.equal(scale[keep], clean[1][keep])
    assert scale[3].isnan() and (codes[3].view(torch.uint8) == 0x7F).all()
    assert [t.shape for t in fp8.quantize_fp8(x[:0])] == [(0, 72), (0,)]
    assert [t.shape for t in fp8.quantize_fp8_group(x[:0])] == [(0, 72), (0, 1)]


def test_errors() -> None:
    codes, scale = fp8.quantize_weight_block(torch.ones(130, 130))
    with pytest.raises(ValueError, match=r"scale must have shape \(2, 2\), got \(2, 1\)"):
        fp8.dequantize_block(codes, scale[:, :1])
    with pytest.raises(ValueError, match=r"scale must have shape \(130, 2\), got \(2, 2\)"):
        fp8.dequantize_group(codes, scale)
    with pytest.raises(TypeError, match=r"codes must have dtype torch\.float8_e4m3fn, got torch\.uint8"):
        fp8.dequantize(codes.view(torch.uint8), scale[0, 0])
    with pytest.raises(ValueError, match=r"gscale must have shape \(\) or \(2,\) \(one per row\), got \(3,\)"):
        fp8.quantize_fp8(torch.ones(2, 8), torch.ones(3))
    with pytest.raises(ValueError, match="block must be at least 1, got 0"):
        fp8.quantize_weight_block(torch.ones(4, 4), (0, 128))
    with pytest.raises(ValueError, match=r"K must be at least 1, got shape \(2, 0\)"):
        fp8.quantize_fp8(torch.ones(2, 0))
    for function in (fp8.quantize_weight_block, fp8.quantize_weight_tensor):
        with pytest.raises(ValueError, match=r"w must have shape \[\.\.\., N, K\], got \(4,\)"):
            function(torch.ones(4))


def test_a_matrix_under_a_given_scale():
    """Its own scale gives the same codes; twice that, values of half the size; one of another shape is refused."""
    w = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
    codes, scale = fp8.quantize_weight_tensor(w)
    again, kept = fp8.quantize_weight_tensor(w, scale)
    assert kept is scale and torch.equal(again.float(), codes.float())
    assert fp8.quantize_weight_tensor(w, scale * 2)[0].float().abs().amax((1, 2)).tolist() == [224.0, 224.0]
    with pytest.raises(ValueError, match=r"scale must have shape \(2,\), got \(2, 4\)"):
        fp8.quantize_weight_tensor(w, scale[:, None].expand(2, 4))
