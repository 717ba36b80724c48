"""Weight layouts: exact inverses over ugly sizes, and equality with FlashInfer's own CPU-capable helpers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from flashinfer_layout_cases import coded, coded_raw, swapped
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.backends.flashinfer import cutlass_layout, matrices, rows, trtllm_layout
from torch_moe_ops.backends.flashinfer.layout import LayerLayout
from torch_moe_ops.backends.flashinfer.matrices import MatrixLayout
from torch_moe_ops.core.schemes import SCHEMES

UGLY = (704, 1856, 2880, 176, 7168)
LAYERS = {"trtllm": trtllm_layout.LAYER, "cutlass": cutlass_layout.LAYER}


def restored(layer: LayerLayout, raw: moe.RawWeights) -> moe.RawWeights:
    from torch_moe_ops.core.layout import Sizes

    sizes = Sizes(raw.num_experts, raw.hidden_size, raw.intermediate_size, raw.is_gated, raw.w13.dtype)
    return dataclasses.replace(raw, **layer.restore(SCHEMES[raw.scheme], layer.prepare(raw), sizes))


SIZES = [(size, 176) for size in UGLY] + [(176, size) for size in UGLY[1:]] + [(704, 704)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("backend", "scheme"), [(b, s) for b, layer in LAYERS.items() for s in layer.rules])
def test_restore_inverts_prepare_bit_for_bit(backend: str, scheme: str, sizes: tuple[int, int]) -> None:
    hidden, inter = (-(-size // SCHEMES[scheme].size_multiple) * SCHEMES[scheme].size_multiple for size in sizes)
    for gated in (True, False):
        raw = coded_raw(scheme, hidden, inter, gated)
        assert restored(LAYERS[backend], raw).equal(raw)


@pytest.mark.parametrize("scheme", list(trtllm_layout.RULES))
def test_prepare_allocates_what_the_op_expects(scheme: str) -> None:
    from torch_moe_ops.core.layout import Sizes

    raw = coded_raw(scheme, 192, 288)
    tensors = trtllm_layout.LAYER.prepare(raw)
    sizes = Sizes(
        1, 192, trtllm_layout.LAYER.intermediate_size(SCHEMES[scheme], tuple(tensors["w2"].shape)), True, raw.w13.dtype
    )
    for name, (shapes, dtypes) in trtllm_layout.LAYER.specs(SCHEMES[scheme], sizes).items():
        if not name.endswith("bias"):
            assert tuple(tensors[name].shape) in shapes and tensors[name].dtype in dtypes, name


def test_padding_keeps_the_halves_apart() -> None:
    """The boundary between gate and up moves with the padding."""
    matrix = torch.arange(1, 7, dtype=torch.uint8)[:, None]
    padded = matrices.pad_matrix(matrix, 2, 8, 2)
    assert padded[:, 0].tolist() == [1, 2, 3, 0, 4, 5, 6, 0] and not padded[:, 1].any()
    assert torch.equal(matrices.cut_matrix(padded, 2, 6, 1), matrix)


@pytest.mark.parametrize("size", [128, 256, 3712, 5760, 7168])
@pytest.mark.parametrize("block", [16, 32])
def test_shuffle_is_the_stated_formula(size: int, block: int) -> None:
    order = rows.shuffle_blocks(size, block)
    n = block // 8
    for old in range(size):
        inside = old % block
        assert order[old - inside + inside % n * 8 + inside // n] == old


# ------------------------------------------------------------------ against FlashInfer's own functions


@pytest.fixture
def core() -> object:
    pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    from flashinfer.fused_moe import core

    return core


@pytest.mark.parametrize(("rows_", "cols"), [(256, 64), (2 * 704, 48), (2 * 2944, 32), (2 * 1856, 16), (7168, 176)])
def test_orders_equal_flashinfers(core: object, rows_: int, cols: int) -> None:
    w = coded(rows_, cols)
    gated = core._maybe_get_cached_w3_w1_permute_indices({}, w, 128)  # takes [up; gate]
    assert torch.equal(rows.row_order(rows_, True, True, 32), rows.swap_halves(rows_)[gated])
    plain = core.get_w2_permute_indices_with_cache({}, w, 128)
    assert torch.equal(rows.row_order(rows_, False, True, 32), plain)
    assert torch.equal(rows.shuffle_blocks(rows_, 16), core.get_w2_permute_indices_with_cache({}, w, 64))
    interleaved = core.reorder_rows_for_gated_act_gemm(w)
    assert torch.equal(w[rows.interleave_halves(rows_)], interleaved)


def test_block_layout_equals_flashinfers(core: object) -> None:
    w = coded(1, 256, 384)
    out = torch.empty(1, 3, 256, 128, dtype=torch.uint8)
    matrices.arrange_weights(w, out, MatrixLayout(blocked=True), torch.arange(256), 1)
    assert torch.equal(out[0], core.convert_to_block_layout(w[0], 128))


@pytest.mark.parametrize("gated", [True, False])
def test_a_bf16_layer_equals_flashinfers_preparation(core: object, gated: bool) -> None:
    """Newer releases prepare weights themselves; for bf16 they do it on a CPU too."""
    prepare = pytest.importorskip("flashinfer.fused_moe.prepare", reason="this release prepares no weights itself")
    api = pytest.importorskip("flashinfer.fused_moe.api")
    if not hasattr(api, "ReLU2"):
        pytest.skip("this release names activations otherwise")
    raw = coded_raw("none", 384, 256, gated)
    raw = dataclasses.replace(raw, w13=raw.w13.view(torch.int16).abs().view(torch.bfloat16))
    theirs = prepare.prepare_trtllm_bf16_weights(
        swapped(raw.w13) if gated else raw.w13,
        raw.w2,
        num_local_experts=1,
        hidden_size=384,
        intermediate_size=256,
        activation=api.SwiGLU() if gated else api.ReLU2(),
    )
    found = {t.flatten().view(torch.uint8).numpy().tobytes() for t in theirs.values() if isinstance(t, Tensor)}
    for name, ours in trtllm_layout.LAYER.prepare(raw).items():
        assert ours.flatten().view(torch.uint8).numpy().tobytes() in found, name


def test_scales_are_tiled_after_their_rows_moved() -> None:
    """Every scale lands where the kernel looks for the scale of its row: row p of the prepared weight."""
    raw = coded_raw("nvfp4", 256, 128)
    tensors = trtllm_layout.LAYER.prepare(raw)
    order = rows.row_order(256, True, True, 32)
    source = raw.w13_scale[0].view(torch.uint8)
    flat = tensors["w13_scale"].view(torch.uint8).flatten()
    for m, c in ((0, 0), (1, 3), (33, 7), (130, 15), (255, 15)):
        offset = ((m // 128) * 4 + c // 4) * 512 + (m % 32) * 16 + (m % 128) // 32 * 4 + c % 4
        assert flat[offset] == source[order[m], c]
        assert torch.equal(tensors["w13"][0, m], raw.w13[0, order[m]])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_fast_tiling_is_the_librarys_tiling(dtype: torch.dtype) -> None:
    scale = coded(256, 20 * dtype.itemsize).view(dtype)
    out = torch.empty_like(scale)
    matrices.tile_scales(matrices._groups(scale), matrices._groups(out))
    assert torch.equal(out.flatten().view(torch.uint8), moe.swizzle_scale(scale).view(torch.uint8))
    assert torch.equal(matrices.untile_scales(matrices._groups(out)), matrices._groups(scale))


def test_int4_nibbles_become_twos_complement() -> None:
    raw = coded_raw("mxint4", 256, 256)
    w2 = trtllm_layout.LAYER.prepare(raw)["w2"].view(torch.uint8)[0]
    order = rows.row_order(256, False, True, 32)
    source = raw.w2.view(torch.uint8)[0]
    assert w2.shape == (1, 256, 128)
    low, high = source[order] & 15, source[order] >> 4
    signed = ((low.int() - 8) & 15) | (((high.int() - 8) & 15) << 4)
    assert torch.equal(w2[0].int(), signed)
