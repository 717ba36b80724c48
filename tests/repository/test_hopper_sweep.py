"""What the sweep over numbers of tokens calls a cliff and a loss."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import benchmark_modules
import pytest
from paths import ROOT

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with benchmark_modules.importable(monkeypatch):
        yield importlib.import_module("bench_hopper_sweep")


def records(ours: dict[int, float], triton: dict[int, float]) -> list[dict[str, Any]]:
    pairs = (("cuda_sm90/nvfp4", ours), ("triton/nvfp4", triton), ("cuda_sm90_packed/nvfp4", dict.fromkeys(ours, 1.0)))
    return [{"layer": layer, "M": m, "us": us} for layer, times in pairs for m, us in times.items()]


def test_a_smooth_sweep_has_no_findings(sweep: ModuleType) -> None:
    assert sweep.findings(records({1: 10, 8: 30, 64: 28, 256: 90}, {1: 10, 8: 29.5, 64: 60, 256: 95})) == []


def test_a_cliff_is_a_larger_batch_that_is_much_faster(sweep: ModuleType) -> None:
    (found,) = sweep.findings(records({64: 50, 8: 57, 1: 10}, {}))
    assert found == {"event": "cliff", "M": 8, "us": 57, "M2": 64, "us2": 50}


def test_a_loss_is_more_than_three_percent_behind_triton(sweep: ModuleType) -> None:
    (found,) = sweep.findings(records({1: 10.2, 8: 31}, {1: 10, 8: 30}))
    assert found == {"event": "loss", "M": 8, "us": 31, "triton_us": 30}
