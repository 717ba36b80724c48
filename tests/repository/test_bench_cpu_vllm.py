"""The benchmark beside vLLM's CPU kernels knows what a layer's result is, and ends where a side has another one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from paths import ROOT

pytest.importorskip("torch_moe_ops._C", reason="the C++ extension was not built")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import bench_cpu_vllm

    for name, value in {"EXPERTS": 4, "TOP_K": 2, "HIDDEN": 256, "INTER": 128}.items():
        monkeypatch.setattr(bench_cpu_vllm, name, value)
    yield bench_cpu_vllm
    for name in ("bench_cpu_vllm", "bench_cpu"):
        del sys.modules[name]


@pytest.mark.parametrize("weights", ["mxfp4", "nvfp4", "int4", "none"])
def test_our_side_is_within_the_bound(bench: Any, weights: str) -> None:
    sides = bench.ours(weights)
    checked = bench.Checked(weights, sides, 5)
    for tokens in (1, 5):
        for to_float64, to_ours in checked.distances(sides, tokens):
            assert 0 < to_float64 < checked.bound and to_ours == 0  # the op gives what the layer gives
    assert 0.1 < checked.want[weights].std() < 10  # of the size of its inputs, not next to zero


@pytest.mark.parametrize("wrong", ["routing weights", "last token", "nan"])
def test_a_side_that_is_wrong_ends_the_program(bench: Any, wrong: str) -> None:
    side = bench.ours("mxfp4")[0]

    def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = side.run(x, ids, weights.flip(-1) if wrong == "routing weights" else weights)
        if wrong != "routing weights":
            out[-1] = float("nan") if wrong == "nan" else 0
        return out

    other = replace(side, library=bench.VLLM, run=run)
    with pytest.raises(SystemExit, match=r"vllm 0.32, mxfp4, 5 tokens: .* at most 0.01"):
        bench.Checked("mxfp4", [side], 5).distances([side, other], 5)


def test_experts_differ(bench: Any) -> None:
    w13 = bench.raw_layer("mxfp4").w13
    assert len({tuple(expert.flatten().tolist()) for expert in w13}) == bench.EXPERTS
