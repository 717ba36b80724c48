"""Microscaling formats against torchao, ModelOpt, compressed-tensors, gguf and transformers.

| compared                                                | how                                                    |
| torchao mxfp4 floor and even, mxfp8 floor               | scales and codes bit for bit, -0 included              |
| torchao rceil                                           | bit for bit, but where float32 log2 misses a next ulp  |
| ModelOpt (rceil)                                        | scales likewise; mxfp4 codes except at ties, which it  |
|                                                         | takes toward zero; mxfp8 codes bit for bit             |
| compressed-tensors mxfp4 (even)                         | scales bit for bit, codes with -0 read as 0            |
| compressed-tensors mxfp8                                | as rceil, except where amax = 448 * 2^n                |
| dequantization of every tool, gguf and transformers too | bit for bit                                            |
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from paths import DATA
from safetensors.torch import load_file
from torch import Tensor

from torch_moe_ops.numerics import e2m1, mx

VECTORS = DATA / "vectors"
FP4, FP8 = load_file(VECTORS / "mxfp4.safetensors"), load_file(VECTORS / "mxfp8.safetensors")
CASES = [("e2m1", c) for c in ("main_bf16", "main_fp32", "saturation_fp32", "ties_fp32")]
CASES += [("e4m3", c) for c in ("main_bf16", "main_fp32", "ties_fp32")]
MAX = {"e2m1": 6.0, "e4m3": 448.0, "e3m2": 28.0, "e2m3": 7.5}


def vectors(element: str) -> dict[str, Tensor]:
    return FP4 if element == "e2m1" else FP8


def element_codes(codes: Tensor, element: str, keep_sign_of_zero: bool = True) -> Tensor:
    """uint8 codes [..., K / 32, 32]."""
    flat = e2m1.unpack(codes) if element == "e2m1" else codes.view(torch.uint8)
    if not keep_sign_of_zero:
        flat = torch.where(flat == (8 if element == "e2m1" else 128), 0, flat)
    return flat.unflatten(-1, (-1, 32))


def block_amax(x: Tensor) -> Tensor:
    return x.float().abs().unflatten(-1, (-1, 32)).amax(-1)


def log2_in_float32(amax: Tensor, top: float) -> Tensor:
    """The exponent byte of a tool that takes ceil(log2f(amax / max)), from numpy."""
    with np.errstate(divide="ignore"):
        exponent = np.ceil(np.log2(amax.numpy() / np.float32(top)))
    return torch.from_numpy(np.clip(exponent + 127, 0, 254)).to(torch.uint8)


TORCHAO = [(*case, "floor") for case in CASES] + [(*case, "even") for case in CASES if case[0] == "e2m1"]


@pytest.mark.parametrize("element, case, rule", TORCHAO)
def test_floor_and_even_are_torchao(element: str, case: str, rule: str) -> None:
    data = vectors(element)
    codes, scale = mx.quantize_mx(data[f"input/{case}"], element, rule)
    assert torch.equal(scale, data[f"torchao/{case}/{rule}_scales"])
    theirs = data[f"torchao/{case}/{rule}_codes"]
    assert torch.equal(element_codes(codes, element), element_codes(theirs, element))


@pytest.mark.parametrize("element, case", CASES)
@pytest.mark.parametrize("tool, prefix", (("torchao", "rceil_"), ("modelopt", "")))
def test_rceil(element: str, case: str, tool: str, prefix: str) -> None:
    """Both tools take a float32 logarithm, which rounds 1 + 2^-23 times a power of two down to that power."""
    data = vectors(element)
    x = data[f"input/{case}"]
    codes, scale = mx.quantize_mx(x, element)
    theirs = data[f"{tool}/{case}/{prefix}scales"]
    assert torch.equal(theirs, log2_in_float32(block_amax(x), MAX[element]))
    same = scale == theirs
    assert int((~same).sum()) == (1 if (element, case) == ("e2m1", "ties_fp32") else 0)
    assert (scale[~same] == theirs[~same] + 1).all()
    keep = tool == "torchao"
    ours = element_codes(codes, element, keep)[same]
    others = element_codes(data[f"{tool}/{case}/{prefix}codes"], element, keep)[same]
    if tool == "modelopt" and element == "e2m1":
        moved = ours != others
        y = x.float().unflatten(-1, (-1, 32))[same] * 2.0 ** (127 - scale[same].float())[:, None]
        ties = torch.isin(y.abs(), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]))
        assert not (moved & ~ties).any()
        assert (e2m1.decode(others).abs() <= y.abs()).where(moved, True).all()
    else:
        assert torch.equal(ours, others)


@pytest.mark.parametrize("case", ("main_bf16", "main_fp32", "saturation_fp32", "ties_fp32"))
def test_compressed_tensors_mxfp4_is_even(case: str) -> None:
    codes, scale = mx.quantize_mx(FP4[f"input/{case}"], "e2m1", "even")
    assert torch.equal(scale, FP4[f"ct/{case}/scales"])
    theirs = element_codes(FP4[f"ct/{case}/codes"], "e2m1", False)
    assert torch.equal(element_codes(codes, "e2m1", False), theirs)


@pytest.mark.parametrize("case", ("main_bf16", "main_fp32", "ties_fp32"))
def test_compressed_tensors_mxfp8_is_rceil_but_at_the_maximum(case: str) -> None:
    x = FP8[f"input/{case}"]
    codes, scale = mx.quantize_mx(x, "e4m3")
    at_maximum = torch.frexp(block_amax(x)).mantissa == 0.875  # 448 = 0.875 * 2^9
    assert torch.equal(FP8[f"ct/{case}/scales"], scale + at_maximum.to(torch.uint8))
    ours, theirs = (element_codes(t, "e4m3", False) for t in (codes, FP8[f"ct/{case}/codes"]))
    assert torch.equal(ours[~at_maximum], theirs[~at_maximum])


@pytest.mark.parametrize("element, case", CASES)
def test_dequantize_every_tool(element: str, case: str) -> None:
    data = vectors(element)
    tools = [("modelopt", ""), ("ct", ""), ("torchao", "floor_"), ("torchao", "rceil_")]
    tools += [("torchao", "even_")] if element == "e2m1" else []
    for tool, prefix in tools:
        codes, scale = data[f"{tool}/{case}/{prefix}codes"], data[f"{tool}/{case}/{prefix}scales"]
        assert torch.equal(mx.dequantize_mx(codes, scale, element), data[f"{tool}/{case}/{prefix}dequant"]), tool


@pytest.mark.parametrize("case", ("main_bf16", "main_fp32", "saturation_fp32", "ties_fp32"))
def test_dequantize_gguf_blocks(case: str) -> None:
    """17 bytes: the exponent, then 16 bytes of element j | element j + 16 << 4."""
    blocks = FP4[f"gguf/{case}/blocks"]
    codes = torch.cat((blocks[..., 1:] & 15, blocks[..., 1:] >> 4), -1).flatten(-2)
    values = mx.dequantize_mx(e2m1.pack(codes), blocks[..., 0].contiguous(), "e2m1")
    assert torch.equal(values, FP4[f"gguf/{case}/dequant"])


def test_dequantize_as_transformers_does_for_gpt_oss() -> None:
    codes, scale = FP4["torchao/main_bf16/rceil_codes"], FP4["torchao/main_bf16/rceil_scales"]
    values = mx.dequantize_mx(codes, scale, "e2m1")
    assert torch.equal(values.mT, FP4["transformers/main_bf16/rceil_dequant_transposed"])


def wide_blocks(seed: int) -> Tensor:
    """Blocks over the whole range of float32, subnormals too."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 31, 32, generator=g).double()
    return (x * 2.0 ** torch.arange(-150.0, 98.0).view(8, 31, 1)).float().flatten(1)


@pytest.mark.parametrize("element", MAX)
@pytest.mark.parametrize("rule", ("floor", "rceil", "even"))
def test_error_is_within_half_a_step(element: str, rule: str) -> None:
    """In float64: half a unit of the last place of the element at that magnitude, unless the rule clips."""
    x = wide_blocks(1)
    codes, scale = mx.quantize_mx(x, element, rule)
    back = mx.dequantize_mx(codes, scale, element, dtype=torch.float64)
    unit = (2.0 ** (scale.double() - 127)).repeat_interleave(32, -1)
    y = (x.double() / unit).abs()
    mantissa_bits, smallest = {"e2m1": (1, 1.0), "e4m3": (3, 2.0**-6), "e3m2": (2, 0.25), "e2m3": (3, 1.0)}[element]
    step = 2.0 ** (torch.frexp(y.clamp_min(smallest)).exponent.double() - 1 - mantissa_bits)
    clipped = y > MAX[element]
    assert ((x.double() - back).abs() / unit <= torch.where(clipped, y - MAX[element], step / 2) + 1e-300).all()
    assert clipped.any() == (rule != "rceil")


def test_rceil_is_tight() -> None:
    """One exponent less would clip; byte 0 is the lowest."""
    x = wide_blocks(2)
    for element, top in MAX.items():
        _, scale = mx.quantize_mx(x, element)
        amax = block_amax(x).double()
        assert (amax <= top * 2.0 ** (scale.double() - 127) * (1 + 2.0**-23)).all()
        low = scale > 0
        assert (amax[low] > top * 2.0 ** (scale[low].double() - 128)).all()


@pytest.mark.parametrize("element", MAX)
def test_zero_blocks_signed_zeros_and_strides(element: str) -> None:
    x = wide_blocks(3).view(2, 4, -1).clone()
    x[0, 0, :32], x[0, 1, :32] = 0.0, -0.0
    codes, scale = mx.quantize_mx(x, element)
    assert scale[0, :2, 0].tolist() == [0, 0]
    values = mx.dequantize_mx(codes, scale, element)
    assert not values[0, :2, :32].any()
    assert values[0, 1, :32].signbit().all() and not values[0, 0, :32].signbit().any()
    again = mx.quantize_mx(x.mT.contiguous().mT, element)
    assert torch.equal(again[1], scale) and torch.equal(again[0].view(torch.uint8), codes.view(torch.uint8))
    empty = mx.quantize_mx(x[:, :0], element)
    assert empty[1].shape == (2, 0, x.shape[-1] // 32)
    assert mx.dequantize_mx(*empty, element).shape == (2, 0, x.shape[-1])


@pytest.mark.parametrize("element", MAX)
def test_a_bad_block_does_not_disturb_the_others(element: str) -> None:
    x = wide_blocks(4)
    clean = mx.dequantize_mx(*mx.quantize_mx(x, element), element)
    x[3, 40], x[5, 40] = float("nan"), float("inf")
    codes, scale = mx.quantize_mx(x, element)
    assert (scale == 255).nonzero().tolist() == [[3, 1], [5, 1]]
    values = mx.dequantize_mx(codes, scale, element)
    others = torch.ones_like(x, dtype=torch.bool)
    others[[3, 5], 32:64] = False
    assert torch.equal(values[others], clean[others])
    assert values[~others].isnan().all()


def test_scale_byte_255_is_nan() -> None:
    values = mx.dequantize_mx(torch.zeros(1, 32, dtype=torch.uint8), torch.tensor([[0, 255]]).byte(), "e2m1")
    assert values[:, 32:].isnan().all() and not values[:, :32].any()


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"K of x must be a positive multiple of 32, got shape \(2, 48\)"):
        mx.quantize_mx(torch.zeros(2, 48), "e2m1")
    with pytest.raises(ValueError, match=r"element must be one of .*got 'e5m2'"):
        mx.quantize_mx(torch.zeros(2, 32), "e5m2")
    with pytest.raises(TypeError, match=r"x must have one of the dtypes .*got torch\.int32"):
        mx.quantize_mx(torch.zeros(2, 32, dtype=torch.int32), "e2m1")
    codes, scale = mx.quantize_mx(torch.zeros(2, 64), "e4m3")
    with pytest.raises(TypeError, match=r"codes of e2m1 must have dtype torch\.uint8, got torch\.float8_e4m3fn"):
        mx.dequantize_mx(codes, scale, "e2m1")
    with pytest.raises(ValueError, match=r"scale must have shape \(2, 2\), got \(2, 1\)"):
        mx.dequantize_mx(codes, scale[:, :1], "e4m3")
