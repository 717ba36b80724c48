"""The 128x4 scale tiling: the offset formula, and the bytes that torchao makes."""

from __future__ import annotations

import pytest
import torch
from paths import DATA
from safetensors.torch import load_file
from torch import Tensor

from torch_moe_ops.numerics.swizzle import padded_shape, swizzle_scale, unswizzle_scale

VECTORS = DATA / "vectors"
DTYPES = (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bfloat16, torch.float16)
SHAPES = ((1, 1), (128, 4), (129, 5), (200, 6), (108, 6), (300, 9), (0, 4), (4, 0))


def offset(m: int, c: int, cols: int) -> int:
    tiles = -(-cols // 4)
    return (((m // 128) * tiles + c // 4) * 32 + m % 32) * 16 + (m % 128) // 32 * 4 + c % 4


def bits(t: Tensor) -> Tensor:
    return t.view(torch.uint8 if t.element_size() == 1 else torch.int16)


def coded(rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    """Distinct elements where 16 bits allow it; never zero, so that padding shows."""
    values = torch.arange(rows * cols).reshape(rows, cols)
    if dtype.itemsize == 1:
        return (values % 127 + 1).to(torch.uint8).view(dtype)
    return (values % 32000 + 1).to(torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_element_lands_at_its_offset(shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows, cols = shape
    scale = coded(rows, cols, dtype)
    flat = swizzle_scale(scale)
    padded = padded_shape(rows, cols)
    assert flat.dtype == dtype and flat.shape == (padded[0] * padded[1],)
    expected = torch.zeros(flat.numel(), dtype=bits(scale).dtype)
    for m in range(rows):
        for c in range(cols):
            expected[offset(m, c, cols)] = bits(scale)[m, c]
    assert torch.equal(bits(flat), expected)
    back = unswizzle_scale(flat, rows, cols)
    assert back.dtype == dtype and torch.equal(bits(back), bits(scale))


@pytest.mark.parametrize("name", ("nvfp4", "mxfp4", "mxfp8"))
def test_bytes_of_torchao(name: str) -> None:
    """nvfp4: torchao's swizzle of torchao's and of ModelOpt's scales; mxfp4, mxfp8: of torchao's rceil scales."""
    vectors = load_file(VECTORS / f"{name}.safetensors")
    compared = 0
    for key in vectors:
        if not key.endswith("scales_swizzled"):
            continue
        source = key.removesuffix("_swizzled")
        if source.endswith("modelopt_scales"):
            source = source.replace("torchao/", "modelopt/").replace("modelopt_scales", "scales")
        scale, flat = vectors[source], vectors[key]
        assert torch.equal(bits(swizzle_scale(scale)), bits(flat)), key
        assert torch.equal(bits(unswizzle_scale(flat, *scale.shape)), bits(scale)), key
        compared += 1
    assert compared == {"nvfp4": 12, "mxfp4": 4, "mxfp8": 3}[name]


def test_leading_dimensions_and_strides() -> None:
    scale = torch.stack([coded(200, 6, torch.uint8), coded(200, 6, torch.uint8).flip(0)])[None]
    flat = swizzle_scale(scale)
    assert flat.shape == (1, 2, 256 * 8)
    assert torch.equal(flat[0, 1], swizzle_scale(scale[0, 1]))
    assert torch.equal(swizzle_scale(scale.mT.contiguous().mT), flat)
    assert torch.equal(unswizzle_scale(flat.mT.contiguous().mT, 200, 6), scale)
    assert swizzle_scale(scale[:, :0]).shape == (1, 0, 256 * 8)
    assert unswizzle_scale(flat[:, :0], 200, 6).shape == (1, 0, 200, 6)


def test_results_do_not_alias_the_input() -> None:
    scale = coded(128, 4, torch.uint8)
    flat = swizzle_scale(scale)
    back = unswizzle_scale(flat, 128, 4)
    before = flat.clone()
    scale.zero_()
    assert torch.equal(flat, before)
    flat.zero_()
    assert torch.equal(back, coded(128, 4, torch.uint8))


def test_errors() -> None:
    with pytest.raises(TypeError, match=r"1 or 2 bytes, got torch\.float32"):
        swizzle_scale(torch.zeros(4, 4))
    with pytest.raises(TypeError, match=r"1 or 2 bytes, got torch\.float32"):
        unswizzle_scale(torch.zeros(512), 4, 4)
    with pytest.raises(ValueError, match=r"\[\.\.\., rows, cols\], got \(4,\)"):
        swizzle_scale(torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"hold 1024 elements .*rows=200, cols=3.*got shape \(512,\)"):
        unswizzle_scale(torch.zeros(512, dtype=torch.uint8), 200, 3)
