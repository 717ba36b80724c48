"""On a CUDA device: our layouts, bit for bit, against FlashInfer's own CUDA helpers (SM90 or later)."""

from __future__ import annotations

import pytest
import torch
from flashinfer_layout_cases import coded, coded_raw, swapped
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.backends.flashinfer import matrices, rows, trtllm_layout
from torch_moe_ops.backends.flashinfer.matrices import MatrixLayout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

flashinfer = pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")

TILES = {32: 128, 16: 64}  # our block of the shuffle -> FlashInfer's epilogue tile


def as_bytes(t: Tensor) -> Tensor:
    return t.contiguous().flatten().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(128, 4), (256, 44), (2 * 2944, 180), (7168, 128)], ids=str)
def test_tiling_equals_block_scale_interleave(shape: tuple[int, int], dtype: torch.dtype) -> None:
    scale = coded(shape[0], shape[1] * dtype.itemsize).view(dtype).cuda()
    out = torch.empty_like(scale)
    matrices.tile_scales(matrices._groups(scale), matrices._groups(out))
    assert torch.equal(as_bytes(out), as_bytes(flashinfer.block_scale_interleave(scale)))


@pytest.mark.parametrize("shape", [(1, 1), (5, 9), (130, 45), (704, 11), (2880, 90)], ids=str)
def test_swizzle_scale_equals_block_scale_interleave_with_padding(shape: tuple[int, int]) -> None:
    scale = coded(*shape).cuda()
    assert torch.equal(moe.swizzle_scale(scale).flatten(), flashinfer.block_scale_interleave(scale).flatten())


@pytest.mark.parametrize("block", TILES)
@pytest.mark.parametrize("shape", [(256, 4), (2 * 704, 44), (7168, 128)], ids=str)
def test_scales_of_a_shuffled_weight_equal_shuffle_matrix_sf_a(shape: tuple[int, int], block: int) -> None:
    scale = coded(*shape).cuda()
    out = torch.empty_like(scale)[None]
    matrices.arrange_scales(scale[None], out, rows.row_order(shape[0], False, True, block).cuda(), 1)
    assert torch.equal(as_bytes(out), as_bytes(flashinfer.shuffle_matrix_sf_a(scale, TILES[block])))


@pytest.mark.parametrize("block", TILES)
@pytest.mark.parametrize("shape", [(256, 64), (2 * 1856, 176), (7168, 352)], ids=str)
def test_shuffled_weights_equal_shuffle_matrix_a(shape: tuple[int, int], block: int) -> None:
    weight = coded(*shape).cuda()
    out = torch.empty_like(weight)[None]
    matrices.arrange_weights(
        weight[None], out, MatrixLayout(shuffle=block), rows.shuffle_blocks(shape[0], block).cuda(), 1
    )
    assert torch.equal(out[0], flashinfer.shuffle_matrix_a(weight, TILES[block]))


def theirs(weight: Tensor, gated: bool, scheme: str, is_scale: bool = False) -> Tensor:
    """One expert's matrix through FlashInfer's helpers, in the order that its own tests call them."""
    from flashinfer.fused_moe import core

    rule = trtllm_layout.RULES[scheme].matrix
    weight = core.reorder_rows_for_gated_act_gemm(weight) if gated and rule.interleave else weight
    if is_scale:
        return flashinfer.shuffle_matrix_sf_a(weight, TILES[rule.shuffle])
    shuffled = flashinfer.shuffle_matrix_a(weight, TILES[rule.shuffle])
    return core.convert_to_block_layout(shuffled, 128) if rule.blocked else shuffled


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4", "mxfp8", "mxint4", "fp8", "fp8_block", "none"])
def test_a_prepared_layer_equals_flashinfers_helpers(scheme: str, gated: bool) -> None:
    """Sizes that need no padding; both devices prepare the same bytes."""
    raw = coded_raw(scheme, 768, 512, gated)
    prepared = trtllm_layout.LAYER.prepare(raw.to("cuda"))
    for name, tensor in trtllm_layout.LAYER.prepare(raw).items():
        assert torch.equal(as_bytes(prepared[name].cpu()), as_bytes(tensor)), name
    flip = trtllm_layout.RULES[scheme].matrix.flip
    for name, has_gate in (("w13", gated), ("w2", False)):
        for part in (name, f"{name}_scale"):
            source = getattr(raw, part)
            if source is None or (part.endswith("scale") and scheme in ("fp8", "fp8_block")):
                continue
            source = (swapped(source) if has_gate else source)[0].cuda()
            is_scale = part.endswith("scale")
            source = source if source.dtype == torch.bfloat16 and is_scale else source.view(torch.uint8)
            expected = as_bytes(theirs(source, has_gate, scheme, is_scale))
            assert torch.equal(as_bytes(prepared[part]), expected if is_scale else expected ^ flip), part


def test_padded_scales_of_a_layer_are_zero_where_nothing_is() -> None:
    """FlashInfer's kernel pads a matrix by itself; ours is padded before, halves apart. Same bytes for w2."""
    raw = coded_raw("nvfp4", 256, 176)
    scale = torch.zeros(256, 16, dtype=torch.uint8)  # 176 padded to 256 values
    scale[:, :11] = raw.w2_scale[0].view(torch.uint8)
    expected = flashinfer.shuffle_matrix_sf_a(scale.cuda(), 128)
    assert torch.equal(as_bytes(trtllm_layout.LAYER.prepare(raw.to("cuda"))["w2_scale"]), as_bytes(expected))
