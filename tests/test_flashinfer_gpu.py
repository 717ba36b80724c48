"""On a CUDA device: our scale tiling and shuffles, bit for bit, against FlashInfer's own CUDA helpers (SM90 or later)."""

from __future__ import annotations

import pytest
import torch
from test_flashinfer_layouts import coded

from torch_moe_ops.flashinfer import matrices, rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("shape", [(128, 4), (256, 44), (2 * 2944, 180), (7168, 128)])
def test_tiling_equals_block_scale_interleave(shape: tuple[int, int]) -> None:
    flashinfer = pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    scale = coded(*shape).cuda()
    out = torch.empty_like(scale)
    matrices.tile_scales(matrices._groups(scale), matrices._groups(out))
    assert torch.equal(out.flatten(), flashinfer.block_scale_interleave(scale).flatten())


@pytest.mark.parametrize("shape", [(256, 4), (2 * 704, 44), (7168, 128)])
def test_scales_of_a_shuffled_weight_equal_shuffle_matrix_sf_a(shape: tuple[int, int]) -> None:
    flashinfer = pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    scale = coded(*shape).cuda()
    out = torch.empty_like(scale)[None]
    matrices.arrange_scales(scale[None], out, rows.row_order(shape[0], False, True, 32).cuda(), 1)
    theirs = flashinfer.shuffle_matrix_sf_a(scale, 128)
    assert torch.equal(out.flatten(), theirs.view(torch.uint8).flatten())
