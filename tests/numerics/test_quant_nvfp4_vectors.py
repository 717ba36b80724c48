"""NVFP4 against tensors that ModelOpt, torchao, compressed-tensors and gguf made.

| compared                                          | how                                                    |
| ModelOpt block scales, codes, scale_2 (6 cases)   | bit for bit, code 8 (-0) read as 0                     |
| dequantization of ModelOpt and torchao (13 cases) | bit for bit                                            |
| dequantization of compressed-tensors (6 cases)    | within 2 ulp: it divides by its global scale           |
| dequantization of gguf's NVFP4 blocks             | bit for bit, without scale_2                           |
| torchao codes where its scale is ModelOpt's       | equal, except where the quotient's order shows         |
| the activation form against ModelOpt's            | scales equal or neighbours; codes equal where they are |
"""

from __future__ import annotations

import pytest
import torch
from paths import DATA
from safetensors.torch import load_file
from torch import Tensor

from torch_moe_ops.numerics import e2m1, nvfp4

VECTORS = load_file(DATA / "vectors" / "nvfp4.safetensors")
GIVEN = ("static_scale_fp32", "static_scale_large_fp32")  # scale_2 comes from outside
CASES = ("main_bf16", "main_fp32", "ties_fp32", "wide_bf16", *GIVEN)


def tensors(tool: str, case: str) -> tuple[Tensor, Tensor]:
    return VECTORS[f"{tool}/{case}/codes"], VECTORS[f"{tool}/{case}/scales"]


def codes_of(packed: Tensor) -> Tensor:
    """One code an element, -0 as 0."""
    codes = e2m1.unpack(packed)
    return torch.where(codes == 8, 0, codes)


def scale_bytes(scale: Tensor) -> Tensor:
    return scale.view(torch.uint8)


def ulps(a: Tensor, b: Tensor) -> int:
    """Largest distance in float32 units of the last place, for values of equal sign."""
    assert torch.equal(a.signbit() & (a != 0), b.signbit() & (b != 0))
    bits = [t.abs().view(torch.int32) for t in (a, b)]
    return int((bits[0] - bits[1]).abs().max())


@pytest.mark.parametrize("case", CASES)
def test_weight_quantizer_is_modelopt(case: str) -> None:
    given = VECTORS[f"modelopt/{case}/global_scale"]
    codes, scale, scale_2 = nvfp4.quantize_weight(VECTORS[f"input/{case}"], given if case in GIVEN else None)
    theirs = tensors("modelopt", case)
    assert torch.equal(scale_2, given)
    assert torch.equal(scale_bytes(scale), scale_bytes(theirs[1]))
    assert torch.equal(codes_of(codes), codes_of(theirs[0]))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tool", ("modelopt", "torchao"))
def test_dequantize_is_modelopt_and_torchao(tool: str, case: str) -> None:
    values = nvfp4.dequantize(*tensors(tool, case), VECTORS[f"modelopt/{case}/global_scale"])
    assert torch.equal(values, VECTORS[f"{tool}/{case}/dequant"])


def test_experts_have_scales_of_their_own() -> None:
    case, scale_2 = "experts3d_bf16", VECTORS["torchao/experts3d_bf16/global_scale"]
    values = nvfp4.dequantize(*tensors("torchao", case), scale_2)
    assert torch.equal(values, VECTORS[f"torchao/{case}/dequant"])
    assert torch.equal(nvfp4.quantize_weight(VECTORS[f"input/{case}"])[2], scale_2)


@pytest.mark.parametrize("case", CASES)
def test_dequantize_compressed_tensors(case: str) -> None:
    """Its factor is S / g; ours is S * fl(1 / g), as a file's global scale is converted once, at load."""
    alpha = VECTORS[f"ct/{case}/global_scale"].reshape(()).reciprocal()
    values = nvfp4.dequantize(*tensors("ct", case), alpha)
    assert ulps(values, VECTORS[f"ct/{case}/dequant"]) <= 2


def test_dequantize_gguf_blocks() -> None:
    """Superblocks of 64: four scales, then four times 8 bytes, byte j = element j | element j + 8 << 4."""
    blocks = VECTORS["gguf/wide_bf16/blocks"].unflatten(-1, (-1, 36))
    scale = blocks[..., :4].flatten(-2).view(torch.float8_e4m3fn)
    nibbles = blocks[..., 4:].unflatten(-1, (4, 8))
    codes = torch.cat((nibbles & 15, nibbles >> 4), -1).flatten(-3)
    values = nvfp4.dequantize(e2m1.pack(codes), scale)
    assert torch.equal(values, VECTORS["gguf/wide_bf16/dequant_unscaled"])


@pytest.mark.parametrize("case", CASES)
def test_torchao_codes_where_the_scale_is_the_same(case: str) -> None:
    """torchao computes x * (1 / s2) / s: the rounding of another order moves few codes, by one step."""
    given = VECTORS[f"modelopt/{case}/global_scale"]
    codes, scale, _ = nvfp4.quantize_weight(VECTORS[f"input/{case}"], given if case in GIVEN else None)
    theirs = tensors("torchao", case)
    same = scale_bytes(scale) == scale_bytes(theirs[1])
    assert same.float().mean() > 0.85
    ours, others = (codes_of(t).unflatten(-1, (-1, 16))[same].int() for t in (codes, theirs[0]))
    assert ((ours - others).abs() <= 1).all()
    assert (ours == others).float().mean() > 0.9995


@pytest.mark.parametrize("case", ("main_bf16", "main_fp32", "wide_bf16", "ties_fp32"))
def test_activation_form_against_modelopt(case: str) -> None:
    """It multiplies by fl(1/6) and 1 / scale_2 where ModelOpt divides: a scale may land on the neighbour.

    Blocks that are zero, or below ModelOpt's smallest scale, differ by contract and are left out.
    """
    scale_2 = VECTORS[f"modelopt/{case}/global_scale"]
    x = VECTORS[f"input/{case}"]
    codes, scale = nvfp4.quantize_activation(x, scale_2.reciprocal())
    theirs = tensors("modelopt", case)
    ours, others = scale_bytes(scale).int(), scale_bytes(theirs[1]).int()
    normal = x.float().abs().unflatten(-1, (-1, 16)).amax(-1) > 6 * 2.0**-9 * scale_2
    assert normal.float().mean() > 0.9
    assert ((ours - others).abs()[normal] <= 1).all()
    same = normal & (ours == others)
    assert same[normal].float().mean() > 0.97
    a, b = (codes_of(t).unflatten(-1, (-1, 16))[same] for t in (codes, theirs[0]))
    assert (a == b).float().mean() > 0.999


def test_zero_and_lost_blocks_differ_by_contract() -> None:
    """Rows 0 and 2 of main_*: an all-zero block, and one whose block scale underflows."""
    x = VECTORS["input/main_bf16"]
    scale_2 = VECTORS["modelopt/main_bf16/global_scale"]
    _, activation = nvfp4.quantize_activation(x, scale_2.reciprocal())
    _, weight, _ = nvfp4.quantize_weight(x)
    assert activation.float()[[0, 2], 0].tolist() == [0.0, 0.0]
    assert weight.float()[[0, 2], 0].tolist() == [1.0, 2.0**-9]
