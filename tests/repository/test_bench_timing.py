"""The order of layers in a round of the benchmarks with other libraries: none is always the first one."""

from __future__ import annotations

from typing import Any

import benchmark_modules
import pytest
from cuda_events import events_noted_in


@pytest.fixture
def timing(monkeypatch: pytest.MonkeyPatch) -> Any:
    with benchmark_modules.importable(monkeypatch):
        from moe_peers import common, timing

        monkeypatch.setattr(common, "DEV", "cpu")
        yield timing


class Inputs:
    x = ids = weights = None


def layers_of(timing: Any, *labels: str) -> list[Any]:
    class Nothing(timing.Layer):  # type: ignore[misc, name-defined]
        def __init__(self, label: str):
            self.label = label

        def __call__(self, *args: Any) -> None:
            if self.label == "fails":
                raise RuntimeError("it fails")

    return [Nothing(label) for label in labels]


def test_every_layer_is_the_first_one_as_often(timing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[str] = []
    one_round = timing._round_cpu

    def noted(cases: list[Any]) -> Any:
        rounds.append("".join(case.layer.label for case in cases))
        return one_round(cases)

    monkeypatch.setattr(timing, "_round_cpu", noted)
    cases, errors = timing.measure(layers_of(timing, "a", "b", "c"), [Inputs()], reps=6, warm_s=0)
    assert rounds == ["abc", "bca", "cab"] * 2 and not errors
    assert [(case.layer.label, len(case.us)) for case in cases] == [("a", 6), ("b", 6), ("c", 6)]


def test_one_that_cannot_run_leaves_the_others(timing: Any) -> None:
    cases, errors = timing.measure(layers_of(timing, "a", "fails"), [Inputs()], reps=3, warm_s=0)
    assert [case.layer.label for case in cases] == ["a"] and [error["layer"] for error in errors] == ["fails/bf16"]


def test_all_of_a_round_is_launched_behind_a_kernel_that_waits(timing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    monkeypatch.setattr(timing.torch.cuda, "Event", events_noted_in(done))
    monkeypatch.setattr(timing.torch.cuda, "_sleep", lambda cycles: done.append(f"wait {cycles // 100_000}"))
    monkeypatch.setattr(timing.torch.cuda, "synchronize", lambda: done.append("synchronize"))
    cases = [
        timing.Case(layer, 1, "graph", lambda label=layer.label: done.append(label), 0.0)
        for layer in layers_of(timing, "a", "b")
    ]
    assert [(case.layer.label, us) for case, us in timing._round_cuda(cases)] == [("a", 250.0), ("b", 250.0)]
    assert done == ["wait 4", "event", "a", "event", "event", "b", "event", "synchronize"]
