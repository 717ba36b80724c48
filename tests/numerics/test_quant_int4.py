"""int4 against compressed-tensors, ModelOpt and gguf, and file layouts against packing by definition.

| compared                                     | how                                                       |
| compressed-tensors, symmetric and asymmetric | int32 words, scales, zero points and values bit for bit   |
| ModelOpt INT4, gguf Q4_0                     | values bit for bit from their nibbles                     |
| GPTQ and AWQ words                           | unpacked from words that a loop over nibbles made         |
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from paths import DATA
from safetensors.torch import load_file
from torch import Tensor

from torch_moe_ops.numerics import int4, int4_files

V = load_file(DATA / "vectors" / "int4_g32.safetensors")
CASES = ("main_bf16", "main_fp32", "ties_bf16")


@pytest.mark.parametrize("case", CASES)
def test_symmetric_is_compressed_tensors(case: str) -> None:
    w = V[f"input/{case}"]
    result = int4.quantize_weight_group(w, scale_dtype=w.dtype)
    assert torch.equal(int4.pack_int32(result.codes), V[f"ct/{case}/sym_packed"])
    assert torch.equal(result.scale, V[f"ct/{case}/sym_scale"])
    assert torch.equal(int4.dequantize(*result), V[f"ct/{case}/sym_dequant"])


@pytest.mark.parametrize("case", CASES)
def test_asymmetric_is_compressed_tensors(case: str) -> None:
    w = V[f"input/{case}"]
    zero = int4_files.unpack_zero_point_rows(V[f"ct/{case}/asym_zero_point"], len(w))
    result = int4.quantize_weight_group(w, symmetric=False, scale_dtype=w.dtype)
    assert torch.equal(int4.pack_int32(result.codes), V[f"ct/{case}/asym_packed"])
    assert torch.equal(result.scale, V[f"ct/{case}/asym_scale"])
    assert result.zero_point is not None and torch.equal(result.zero_point, zero)
    codes = int4.unpack_int32(V[f"ct/{case}/asym_packed"])
    assert torch.equal(int4.dequantize(codes, result.scale, zero), V[f"ct/{case}/asym_dequant"])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ("sym", "asym"))
def test_native_product_of_compressed_tensors(case: str, kind: str) -> None:
    """That tool multiplies in the scale's dtype: our float32 product, rounded once, is the same."""
    rows = len(V[f"input/{case}"])
    zero = int4_files.unpack_zero_point_rows(V[f"ct/{case}/asym_zero_point"], rows) if kind == "asym" else None
    native = V[f"ct/{case}/{kind}_dequant_native"]
    codes = int4.unpack_int32(V[f"ct/{case}/{kind}_packed"])
    assert torch.equal(int4.dequantize(codes, V[f"ct/{case}/{kind}_scale"], zero).to(native.dtype), native)


@pytest.mark.parametrize("case", CASES)
def test_values_of_modelopt(case: str) -> None:
    """The first element is in the HIGH nibble; the file keeps 7 / amax; the quotient has the weight's dtype."""
    packed, reciprocal = V[f"modelopt/{case}/codes"], V[f"modelopt/{case}/recip_scales"]
    swapped = (packed << 4) | (packed >> 4)
    integers = int4.dequantize(int4.unpack(swapped), torch.ones(reciprocal.shape))
    values = (integers.unflatten(-1, (-1, 32)) / reciprocal.float()[..., None]).flatten(-2)
    assert torch.equal(values.to(reciprocal.dtype).float(), V[f"modelopt/{case}/dequant"])


@pytest.mark.parametrize("case", CASES)
def test_values_of_gguf_q4_0(case: str) -> None:
    """18 bytes: an fp16 scale, then 16 bytes of element j | element j + 16 << 4."""
    blocks = V[f"gguf/{case}/q4_0_blocks"]
    scale = blocks[..., :2].contiguous().view(torch.float16)[..., 0]
    codes = torch.cat((blocks[..., 2:] & 15, blocks[..., 2:] >> 4), -1).flatten(-2)
    assert torch.equal(int4.dequantize(codes, scale), V[f"gguf/{case}/q4_0_dequant"])


def random_codes(seed: int, *shape: int) -> Tensor:
    return torch.randint(0, 16, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def pack_word(nibbles: list[int]) -> int:
    """int32 of eight nibbles, the first in the lowest bits."""
    word = sum(n << (4 * i) for i, n in enumerate(nibbles))
    return word - (1 << 32) if word >= 1 << 31 else word


def test_int32_words() -> None:
    codes = random_codes(0, 3, 2, 24)
    packed = int4.pack_int32(codes)
    words = [[[pack_word(row[8 * j : 8 * j + 8]) for j in range(3)] for row in m] for m in codes.tolist()]
    assert packed.tolist() == words
    assert torch.equal(int4.unpack_int32(packed), codes)
    assert torch.equal(int4.pack_int32(codes.mT.contiguous().mT), packed)
    # Read as little-endian bytes they are the two-in-a-byte packing.
    assert packed.numpy().astype("<i4").tobytes() == int4.pack(codes).numpy().tobytes()


def test_signed_nibbles() -> None:
    codes = random_codes(1, 4, 32)
    signed = int4.flip_sign_bit(int4.pack(codes))
    low = (signed.int() & 15).numpy()
    assert (np.where(low > 7, low - 16, low) == codes[:, ::2].int().numpy() - 8).all()
    assert torch.equal(int4.flip_sign_bit(signed), int4.pack(codes))
    assert torch.equal(int4.flip_sign_bit(int4.pack_int32(codes)).view(torch.uint8), signed)
    scale = (torch.rand(4, 1, generator=torch.Generator().manual_seed(2)) + 0.5).bfloat16()
    assert torch.equal(int4.dequantize_signed(signed, scale), (codes.float() - 8) * scale.float())


def gptq_files(codes: Tensor, zero: Tensor, offset: int) -> tuple[Tensor, Tensor]:
    """codes [N, K], zero [N, groups] -> qweight [K / 8, N], qzeros [groups, N / 8]."""
    n, k = codes.shape
    qweight = [[pack_word(codes[col, 8 * j : 8 * j + 8].tolist()) for col in range(n)] for j in range(k // 8)]
    stored = (zero.int() - offset) % 16
    qzeros = [[pack_word(stored[8 * j : 8 * j + 8, g].tolist()) for j in range(n // 8)] for g in range(zero.shape[1])]
    return torch.tensor(qweight, dtype=torch.int32), torch.tensor(qzeros, dtype=torch.int32)


@pytest.mark.parametrize("version", (1, 2))
def test_gptq(version: int) -> None:
    codes, zero = random_codes(3, 16, 64), random_codes(4, 16, 2)
    zero[0, 0] = 0  # wraps around in version 1
    scale = torch.rand(16, 2, generator=torch.Generator().manual_seed(5)).half()
    qweight, qzeros = gptq_files(codes, zero, 2 - version)
    weight = int4_files.unpack_gptq(qweight, qzeros, scale.T, stores_zero_minus_one=version == 1)
    assert weight.zero_point is not None
    assert torch.equal(weight.codes, codes) and torch.equal(weight.zero_point, zero)
    exact = (codes.double() - zero.double().repeat_interleave(32, 1)) * scale.double().repeat_interleave(32, 1)
    assert torch.equal(int4.dequantize(*weight), exact.float())
    stacked = int4_files.unpack_gptq(torch.stack([qweight] * 2), None, torch.stack([scale.T] * 2))
    assert stacked.zero_point is None and torch.equal(stacked.codes[1], codes)
    assert torch.equal(
        int4.dequantize(*stacked)[1], ((codes.double() - 8) * scale.double().repeat_interleave(32, 1)).float()
    )


def test_gptq_with_permuted_groups() -> None:
    codes, zero = random_codes(6, 2, 8, 64), random_codes(7, 2, 8, 4)
    scale = torch.rand(2, 8, 4, generator=torch.Generator().manual_seed(8)) + 0.5
    g_idx = torch.randint(0, 4, (2, 64), generator=torch.Generator().manual_seed(9))
    expected = torch.empty(2, 8, 64, dtype=torch.float64)
    for e in range(2):
        for k in range(64):
            g = int(g_idx[e, k])
            expected[e, :, k] = (codes[e, :, k].double() - zero[e, :, g].double()) * scale[e, :, g].double()
    assert torch.equal(int4.dequantize(codes, scale, zero, g_idx, torch.float64), expected)
    assert torch.equal(int4.dequantize(codes, scale, zero, g_idx.int()), expected.float())
    shared = int4.dequantize(codes, scale, None, g_idx[0])
    assert torch.equal(shared[1], int4.dequantize(codes[1], scale[1], None, g_idx[0]))
    trivial = torch.arange(64) // 16
    assert torch.equal(int4.dequantize(codes, scale, zero, trivial), int4.dequantize(codes, scale, zero))
    assert int4_files.has_contiguous_groups(trivial, 16) and not int4_files.has_contiguous_groups(g_idx, 16)


def test_awq() -> None:
    codes, zero = random_codes(10, 16, 32), random_codes(11, 16, 2)
    scale = torch.rand(16, 2, generator=torch.Generator().manual_seed(12)).half()
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def words(columns: list[list[int]]) -> Tensor:
        """rows of N nibbles -> rows of N / 8 words."""
        packed = [[pack_word([row[8 * j + o] for o in order]) for j in range(len(row) // 8)] for row in columns]
        return torch.tensor(packed, dtype=torch.int32)

    weight = int4_files.unpack_awq(words(codes.T.tolist()), words(zero.T.tolist()), scale.T)
    assert weight.zero_point is not None
    assert torch.equal(weight.codes, codes) and torch.equal(weight.zero_point, zero)
    exact = (codes.double() - zero.double().repeat_interleave(16, 1)) * scale.double().repeat_interleave(16, 1)
    assert torch.equal(int4.dequantize(*weight), exact.float())


@pytest.mark.parametrize("symmetric", (True, False))
@pytest.mark.parametrize("group", (32, 64, 128, -1))
def test_groups(group: int, symmetric: bool) -> None:
    w = torch.randn(2, 3, 256, generator=torch.Generator().manual_seed(13))
    w[0, 0, :32] = 0.0
    codes, scale, zero = int4.quantize_weight_group(w, group, symmetric, torch.float32)
    size = 256 if group == -1 else group
    assert codes.shape == w.shape and scale.shape == (2, 3, 256 // size) and codes.max() <= 15
    error = (int4.dequantize(codes, scale, zero, dtype=torch.float64) - w).abs()
    # Half a step; a whole one where +7.5 or the far end of a rounded zero point saturates.
    assert (error <= scale.double().repeat_interleave(size, -1) * (1 + 1e-6)).all()
    assert (error <= scale.double().repeat_interleave(size, -1) * 0.5000001).float().mean() > 0.99
    again = int4.quantize_weight_group(w.mT.contiguous().mT, group, symmetric, torch.float32)
    assert torch.equal(again.codes, codes) and torch.equal(again.scale, scale)
    assert int4.quantize_weight_group(w[:, :0], group, symmetric).codes.shape == (2, 0, 256)


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"K of codes must be a positive multiple of 8, got shape \(2, 12\)"):
        int4.pack_int32(random_codes(0, 2, 12))
    with pytest.raises(ValueError, match=r"K of w must be a positive multiple of 32, got shape \(2, 48\)"):
        int4.quantize_weight_group(torch.ones(2, 48))
    with pytest.raises(ValueError, match="group must be positive or -1, got 0"):
        int4.quantize_weight_group(torch.ones(2, 32), group=0)
    codes = random_codes(0, 2, 32)
    with pytest.raises(ValueError, match=r"a multiple of its 3 scales, got shape \(2, 32\)"):
        int4.dequantize(codes, torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"zero_point must have shape \(2, 2\), got \(2, 1\)"):
        int4.dequantize(codes, torch.ones(2, 2), torch.ones(2, 1))
    with pytest.raises(ValueError, match=r"g_idx must have one entry per column of codes \(2, 32\), got shape \(16,\)"):
        int4.dequantize(codes, torch.ones(2, 2), None, torch.zeros(16))
    with pytest.raises(ValueError, match=r"scales must have shape \(2, 8\), got \(2, 16\)"):
        int4_files.unpack_gptq(torch.zeros(4, 8, dtype=torch.int32), None, torch.ones(2, 16))
    with pytest.raises(TypeError, match=r"packed must have dtype torch\.uint8 or torch\.int32, got torch\.int8"):
        int4.flip_sign_bit(torch.zeros(2, dtype=torch.int8))
    with pytest.raises(ValueError, match=r"packed must have shape \(2, 3\), got \(1, 3\)"):
        int4_files.unpack_zero_point_rows(torch.zeros(1, 3, dtype=torch.int32), 9)
