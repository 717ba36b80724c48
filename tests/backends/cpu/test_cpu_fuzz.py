"""The program that tries what others do not on the CPU's kernels: a slice of it, and that it finds what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fuzz_cpu
import pytest
import torch
from fuzz_cpu import attempt, drawn, kernels_here
from torch import Tensor

import torch_moe_ops as moe

pytest.importorskip("torch_moe_ops._C", reason="the C++ extension was not compiled")


def _misses(seed: int, count: int) -> Iterator[tuple[float, str]]:
    isas, integers = kernels_here()
    return (found for i in range(count) if not (found := attempt(drawn(seed, i, isas, integers)))[0] < 1)


def test_random_layers() -> None:
    assert not list(_misses(1, 20))


@pytest.mark.slow
def test_many_random_layers() -> None:
    assert not list(_misses(2, 300))


@pytest.mark.parametrize("what", ["33 tokens", "strided", "error"])
def test_what_is_wrong_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = moe.fused_moe_routed

    def wrong(x: Tensor, ids: Tensor, weights: Tensor, w: moe.PreparedWeights, **options: Any) -> Tensor:
        out = real(x, ids, weights, w, **options)
        bad = {"33 tokens": len(x) == 33, "strided": not x.is_contiguous(), "error": w.backend == "cpu"}[what]
        return out * 1.25 if bad else out

    monkeypatch.setattr(moe, "fused_moe_routed", wrong)
    assert any(what in text for _, text in _misses(1, 25))


def test_the_kernels_of_before_are_back() -> None:
    before = torch.ops.moeq_C.cpu_isa(), torch.ops.moeq_C.cpu_integer_isa(), torch.get_num_threads()
    isas, integers = kernels_here()
    assert before[0] in isas
    attempt(drawn(3, 0, isas, integers))
    assert before == (torch.ops.moeq_C.cpu_isa(), torch.ops.moeq_C.cpu_integer_isa(), torch.get_num_threads())


def test_a_crash_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_cpu, "raw_of", lambda *given: 1 / 0)
    (found,) = _misses(1, 1)
    assert found[0] == float("inf") and "ZeroDivisionError" in found[1]
