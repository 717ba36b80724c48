"""The program that tries random gradients: a slice of it, and that it finds what is wrong."""

from __future__ import annotations

from typing import Any

import fuzz_gradients
import pytest
from fuzz_gradients import LAYOUTS, drawn, solve
from torch import Tensor

from torch_moe_ops.core.activations import ACTIVATIONS
from torch_moe_ops.gradients import experts, lora

pytest.importorskip("torch_moe_ops._C", reason="the C++ extension was not compiled")


def _misses(seed: int, count: int) -> list[tuple[float, str]]:
    return [found for i in range(count) if not (found := solve("cpu", seed, i))[0] < 1]


def test_random_gradients() -> None:
    assert not _misses(11, 50)


@pytest.mark.slow
def test_many_random_gradients() -> None:
    assert not _misses(12, 600)


def test_a_wrong_derivative_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = experts.activation_gradients

    def wrong(name: str, *given: Any) -> tuple[Tensor | None, Tensor]:
        of_gate, of_up = real(name, *given)
        return of_gate, of_up * 1.1 if name == "silu" else of_up

    monkeypatch.setattr(experts, "activation_gradients", wrong)
    misses = _misses(11, 50)
    assert misses and all("activation='silu'" in what for _, what in misses)


def test_ranks_of_another_adapter_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora.Factors, "_own", lambda self, low, token: low)
    misses = _misses(11, 50)
    assert misses and all("adapters=0" not in what for _, what in misses)


def test_a_crash_is_no_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_gradients, "raw_of", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        solve("cpu", 0, 0)
    assert fuzz_gradients.attempt("cpu", 0, 0)[0] == float("inf")


@pytest.mark.parametrize("on", LAYOUTS)
def test_problems_are_of_every_kind(on: str) -> None:
    problems = [drawn(on, 0, i) for i in range(3000)]
    layouts = {(d.backend, d.case.scheme) for d in problems}
    assert layouts == {(backend, scheme) for backend, schemes in LAYOUTS[on].items() for scheme in schemes}
    assert {d.case.activation for d in problems} == set(ACTIVATIONS)
    assert {d.ids for d in problems} == {"random", "distinct", "one", "foreign", "nobody"}
    for name in ("merged", "captured", "pieces", "strided", "nan_row", "on_input"):
        assert {getattr(d, name) for d in problems} == {False, True}, name
