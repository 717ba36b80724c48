"""The fuzzer of headers, configs and saved weights: a short run, and that it finds what it is there for."""

from __future__ import annotations

import time
from collections import Counter

import fuzz_loader
import pytest
from checkpoints_support import TooSlow
from loader_sources import sources

from torch_moe_ops.checkpoints import CheckpointError


def cases(tmp_path, numbers):
    outcomes = Counter()
    for number in numbers:
        fuzz_loader.empty(tmp_path)
        outcomes[fuzz_loader.attempt(tmp_path, number).what] += 1
    return outcomes


def test_sources_load(tmp_path):
    fuzz_loader.load_sources(tmp_path)
    kinds = Counter(source.kind for source in sources(tmp_path))
    assert kinds["checkpoint"] > 20 and kinds["prepared"] == kinds["raw"] == 5


def test_mutations(tmp_path):
    outcomes = cases(tmp_path, range(400))
    # Both must occur often, else the mutations test nothing.
    assert outcomes["loaded"] > 60 and outcomes["refused"] > 200


def test_a_process_of_its_own():
    report = fuzz_loader.run(5_000, 30)
    assert sum(report.outcomes.values()) == 30 and report.failures == [] and report.slowest < 1
    by_mutation = sum(report.mutations.values(), Counter())
    assert by_mutation.keys() == report.outcomes.keys() and by_mutation.total() >= 30
    assert {name.partition(": ")[0] for name in report.mutations} >= {"checkpoint, header", "checkpoint, config"}


@pytest.mark.parametrize(
    ("kind", "text", "failure"),
    [
        (KeyError, "{}", KeyError),
        (MemoryError, "{}", MemoryError),
        (CheckpointError, "no file", AssertionError),
        (CheckpointError, "{}: a \x1b[2J", AssertionError),
        (CheckpointError, "{}" + "a" * 10_000, AssertionError),
    ],
)
def test_other_errors_are_failures(tmp_path, monkeypatch, kind, text, failure):
    def fail(*arguments, **options):
        raise kind(text.format(tmp_path))

    monkeypatch.setattr(fuzz_loader, "load_experts", fail)
    with pytest.raises(failure):
        cases(tmp_path, range(20))


def test_a_hang_is_a_failure(tmp_path, monkeypatch):
    def hang(*arguments, **options):
        while True:
            pass

    monkeypatch.setattr(fuzz_loader, "load_experts", hang)
    with pytest.raises(TooSlow):
        cases(tmp_path, range(20))


@pytest.mark.slow
def test_mutations_for_a_minute(tmp_path):
    number, end = 10_000_000, time.monotonic() + 60
    while time.monotonic() < end:
        cases(tmp_path, [number])
        number += 1
