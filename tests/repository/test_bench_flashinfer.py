"""The FlashInfer peer: which tiles its tuning takes, and what the sources of its module are made of."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import benchmark_modules
import pytest
import torch
from paths import ROOT

FIRST, SECOND = (0, 4, 8), (10, 14, 18)


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Any:
    with benchmark_modules.importable(monkeypatch):
        from moe_peers import common, flashinfer_cutlass_sm90

        monkeypatch.setattr(common, "DEV", "cpu")
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        yield SimpleNamespace(common=common, module=flashinfer_cutlass_sm90)


def layer(peer: Any, results: dict[int, Any], times: dict[int, float]) -> Any:
    """A layer whose tactics return or raise what `results` says (else a fixed output) and take these times."""
    made = peer.module.FlashInfer.__new__(peer.module.FlashInfer)
    made.fmt, made.shape, made.present = "mxfp4", peer.common.Shape("small", 4, 2, 128, 128), None
    made.firsts, made.tuned = (0, 10), {}

    def run(x: Any, ids: Any, weights: Any, tactics: list[int]) -> Any:
        for tactic in tactics:
            if isinstance(results.get(tactic), Exception):
                raise results[tactic]
        return torch.ones(2, 2) * max(results.get(t, 1.0) for t in tactics)

    made.run, made.listed = run, lambda: [list(FIRST), list(SECOND)]
    made.time = lambda args, tactics: sum(times.get(t, 1.0) for t in tactics)
    return made


def test_the_fastest_tile_of_each_gemm_is_taken(peer: Any) -> None:
    made = layer(peer, {}, {8: 0.5, 14: 0.2})
    assert made.tune(3) == ([8, 14], {})


def test_an_absent_tile_is_passed_over_and_others_are_told(peer: Any) -> None:
    absent = RuntimeError("x: not in this subset of the module: _ZN3abc")
    made = layer(peer, {4: absent, 8: 1.5, 18: RuntimeError("needs K > 384")}, {8: 0.1, 18: 0.1, 14: 0.5})
    best, out = made.tune(3)
    assert best == [0, 14] and made.present == [[0], [10, 14]]
    assert list(out) == ["GEMM1 64x16x512", "GEMM2 64x16x512"]
    assert "differs from the default tile" in out["GEMM1 64x16x512"] and "K > 384" in out["GEMM2 64x16x512"]


def test_without_the_default_tile_it_raises(peer: Any) -> None:
    made = layer(peer, {0: RuntimeError("not in this subset of the module")}, {})
    with pytest.raises(RuntimeError, match="not in this subset"):
        made.tune(3)


def test_gate_and_up_rows_change_places(peer: Any) -> None:
    w13 = torch.arange(8).view(1, 4, 2)
    assert peer.module.up_first(w13).flatten().tolist() == [4, 5, 6, 7, 0, 1, 2, 3]


def test_other_activations_are_skipped_with_a_reason(peer: Any) -> None:
    weights = SimpleNamespace(shape=peer.common.Shape("small", 4, 2, 128, 128, "relu2"))
    with pytest.raises(peer.common.Unsupported, match="silu"):
        peer.module.build("mxfp4", weights, None)


@pytest.fixture
def mxfp4(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import flashinfer_sm90_mxfp4

    yield flashinfer_sm90_mxfp4
    del sys.modules["flashinfer_sm90_mxfp4"]


def test_the_tiles_without_which_nothing_runs_are_built(mxfp4: Any) -> None:
    for activations in (mxfp4.BF16, mxfp4.FP8):
        tiles = {tile for kind, some in mxfp4.KERNELS.values() for tile in some if kind == activations}
        assert {mxfp4.Tile(64, 16), mxfp4.Tile(128, 64, 256)} <= tiles


def test_every_tile_is_an_operation_of_the_installed_generator(mxfp4: Any) -> None:
    pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    for name, text in mxfp4.sources().items():
        if name in mxfp4.KERNELS:
            assert text.count("template void") == len(mxfp4.KERNELS[name][1]), name


def test_the_peer_names_tactics_in_the_generators_order(peer: Any, mxfp4: Any) -> None:
    pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    from flashinfer.jit.gemm.cutlass import generate_kernels as theirs

    made = [
        o
        for o in theirs.generate_sm90_mixed_type_grouped_gemm_operations(True)
        if theirs.CudaTypeName[o.act_type] == mxfp4.BF16 and o.cga_shape == (1, 1, 1)
    ]
    shapes = list(dict.fromkeys(o.cta_shape for o in made))
    assert shapes == peer.module.TILES


def test_only_what_mxfp4_calls_is_kept(mxfp4: Any) -> None:
    assert mxfp4.is_kept(Path("moe_gemm_mixed_utils.cu")) and mxfp4.is_kept(Path("logger.cpp"))
    assert not mxfp4.is_kept(Path("moe_gemm_kernels_fp8_fp8.cu"))
    assert not mxfp4.is_kept(Path("cutlass_kernel_file_gemm_grouped_sm90_M64_Mixed_group0.generated.cu"))
