"""Layers with experts on the host among threads, streams and graphs: whose rows and results the shared memory holds."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from host_cases import batch, divided
from problems import Case, make_raw
from torch import nn

import torch_moe_ops as moe
from torch_moe_ops.core import extension
from torch_moe_ops.transformers.host_experts import HostExpertWeights

needs_kernels = pytest.mark.skipif(not extension.has_cpu_extension(), reason=extension.cpu_extension_reason() or "")
CASE = Case(experts=6, tokens=3)


class Stream:
    """Stands for a stream of a GPU: what is enqueued runs when somebody waits for it."""

    def __init__(self, enqueued: Callable[[], Any] = lambda: None) -> None:
        self.enqueued, self.waited_for = enqueued, []

    def synchronize(self) -> None:
        self.enqueued()

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other)


@pytest.fixture
def quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@needs_kernels
@pytest.mark.usefixtures("quick_switches")
def test_threads_take_turns_at_the_memory_that_layers_share() -> None:
    given = [batch(CASE), batch(Case(experts=6, tokens=3, seed=1))]
    layers = [divided(CASE, host) for host in (4, 5)]
    expected = [layer(*rows) for layer, rows in zip(layers, given, strict=True)]
    wrong = []

    def run(i: int) -> None:
        wrong.extend(n for n in range(400) if not torch.equal(layers[i](*given[i]), expected[i]))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@needs_kernels
def test_a_layer_is_gone_when_what_it_enqueued_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (divided(CASE, 6, max_tokens=11) for _ in range(2))
    staging, given = first.staging, batch(CASE)
    expected = first(*given, torch.float32)
    (job,) = first._host._jobs.values()
    out = staging.rows(3, 2, torch.bfloat16).out

    def results() -> torch.Tensor:
        out.fill_(7.0)
        torch.ops.moeq_C.run_host_job(job)
        return out.clone()

    found: list[torch.Tensor] = []
    capturing = True
    monkeypatch.setattr(staging, "stream", Stream(lambda: found.append(results())))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    del first
    gc.collect()
    assert not found and torch.equal(results(), expected)  # waiting would end the capture
    capturing = False
    del second
    gc.collect()
    assert len(found) == 1 and torch.equal(found[0], expected)
    assert (results() == 7.0).all()


@needs_kernels
def test_memory_that_graphs_copy_to_is_nobody_elses_later() -> None:
    layer = divided(CASE, 3, max_tokens=13)
    kept = weakref.ref(layer.staging)
    del layer
    gc.collect()
    assert kept() is not None and divided(CASE, 3, max_tokens=13).staging is kept()


@needs_kernels
def test_streams_are_joined_where_the_device_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, current, beside = divided(CASE, 3, max_tokens=17), Stream(), Stream()

    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(layer.staging, "stream", beside)
    monkeypatch.setattr(layer, "_on_device", fails)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    with pytest.raises(torch.OutOfMemoryError):
        layer(*batch(CASE))
    assert beside.waited_for == [current] and current.waited_for == [beside]


def test_exchanged_experts_are_there_for_every_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = divided(CASE, 3)
    splits: list[tuple[int, ...]] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: splits.append(layer.split.host))
    monkeypatch.setattr(layer, "device", torch.device("cuda", 0))
    layer.rebalance([0, 1, 2])
    assert splits == [(3, 4, 5), (0, 1, 2)]


def test_copies_are_refused() -> None:
    layer = divided(CASE, 3)
    model = nn.Sequential(HostExpertWeights(layer))
    for refused in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="HostExperts: must not be copied or pickled"):
            refused(layer)
    with pytest.raises(TypeError, match="HostExperts: must not be copied or pickled"):
        copy.deepcopy(model)


def test_another_default_device_changes_nothing() -> None:
    raw, given = make_raw(CASE), batch(CASE)
    expected = divided(CASE, 3)(*given)
    with torch.device("meta"):
        layer = moe.HostExperts(raw, 3, act_format="none", device="cpu")
        assert torch.equal(layer(*given), expected)
        layer.rebalance([0, 1, 2])
        assert layer(*given).shape == expected.shape
    torch.testing.assert_close(layer(*given), expected, rtol=2**-7, atol=1e-5)
