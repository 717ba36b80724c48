"""Calls that are like an accepted one: what is kept of a call, how much of it, and by which threads and processes."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from accepted_calls import (
    CASE,
    SeenOps,
    call_op,
    check_same,
    error_of,
    gradients,  # noqa: F401 (a fixture of every test)
    made_known,
    new_layer,
    runs_accepted,
    totals,
)
from paths import ROOT
from problems import Case, make_batch, make_raw
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS, cpu
from torch_moe_ops.core.checked_calls import checked_call
from torch_moe_ops.prepared import accepted, fused

# ---- keeping


def test_keeping_raises_nothing_and_knows_nothing_then(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(CASE)
    w = new_layer()

    def fails(*args: Any) -> Any:
        raise MemoryError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(accepted, "checked_call", fails)
        check_same(w, *batch)
    assert not runs_accepted(w, *batch)
    check_same(w, *batch)
    assert runs_accepted(w, *batch)


def test_tensors_that_are_made_of_those_of_a_layer_are_not_compared() -> None:
    """The kernels' terms of such a call are others' at the next one, even if they are like them."""
    batch = make_batch(CASE)
    w = new_layer()
    args = (
        batch[0],
        None,
        *batch[1:],
        *w.op_weights(),
        *(getattr(w, n) for n in ("backend", "act_format", "activation")),
    )
    args += (*w.constants(), w.num_experts, w.local_expert_offset, False, w.weight_policy, None)
    given, ready = checked_call("nvfp4_moe_routed", args, batch[0])
    assert all(a is b for a, b in zip(given[:17], ready[:17], strict=True))
    for field in (*accepted.WEIGHT_FIELDS, "topk_ids", "topk_weights", "hidden_states"):
        if getattr(ready, field) is not None:
            assert not cpu.accept(given, ready._replace(**{field: getattr(ready, field).clone()}), batch[0], 2047), (
                field
            )
    assert not cpu.accept(given, ready, batch[0].float(), 2047)
    weighted = given._replace(router_weight_on_input=True), ready._replace(router_weight_on_input=True)
    assert not cpu.accept(*weighted, batch[0], 2047)
    for number in (-1, 2048, 2**40):
        assert not cpu.accept(given, ready, batch[0], number)


def test_a_call_that_fails_is_not_kept() -> None:
    x, ids, weights = make_batch(CASE)
    w = new_layer()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="topk_ids must have dtype"):
            moe.fused_moe_routed(x, ids.short(), weights, w)
    assert accepted.key_of(w) not in accepted._KEPT


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(CASE)
    layers = [new_layer(Case(experts=4, top_k=2, inter=64 * i)) for i in range(1, accepted.MAX_TRIES + 3)]
    layers = [dataclasses.replace(w, num_experts=layers[0].num_experts) for w in layers]
    for w in layers:
        check_same(w, *batch)
    assert [runs_accepted(w, *batch) for w in layers] == [True] * accepted.MAX_TRIES + [False] * 2
    assert accepted._KEPT[accepted.key_of(layers[0])].tries == accepted.MAX_TRIES
    monkeypatch.setattr(accepted, "MAX_KEPT", len(accepted._KEPT))
    w, known = new_layer(), len(accepted._KEPT)
    check_same(w, *batch)
    assert not runs_accepted(w, *batch) and len(accepted._KEPT) == known


def test_odd_calls_leave_room_for_others() -> None:
    x, ids, weights = make_batch(CASE)
    w = new_layer()
    wide = torch.cat([x, x], 1)[:, : x.shape[1]]
    for _ in range(2 * accepted.MAX_TRIES):
        moe.fused_moe_routed(wide, ids, weights, w)
        moe.fused_moe_routed(x[:0], ids[:0], weights[:0], w)
        with torch.enable_grad():
            moe.fused_moe_routed(x.clone().requires_grad_(), ids, weights, w)
        with SeenOps():
            moe.fused_moe_routed(x, ids, weights, w)
        torch.func.vmap(lambda x: moe.fused_moe_routed(x, ids, weights, w))(x[None])
    assert accepted.key_of(w) not in accepted._KEPT
    made_known(w, x, ids, weights)


def test_numbers_are_of_one_set_of_names_each() -> None:
    numbers = [kept.number for kept in accepted._KEPT.values()]
    assert len(set(numbers)) == len(numbers)
    text = (ROOT / "csrc" / "cpu" / "accepted.h").read_text()
    assert f"kAcceptedNames = {accepted.MAX_KEPT};" in text and f"kAcceptedPerNames = {accepted.MAX_TRIES};" in text


def test_a_module_that_is_loaded_anew_gives_no_number_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(CASE)
    w = made_known(new_layer(), *batch)
    known = {kept.number for kept in accepted._KEPT.values()}
    monkeypatch.setattr(accepted, "_KEPT", {})
    for other in (dataclasses.replace(new_layer(), local_expert_offset=1), w):
        assert not runs_accepted(other, *batch)
        check_same(other, *batch)
        check_same(other, *batch)
        assert runs_accepted(other, *batch)
    assert not {kept.number for kept in accepted._KEPT.values()} & known


def test_layers_of_another_class_are_not_compared() -> None:
    """They may give the op other tensors and names than their attributes."""

    class Doubled(moe.PreparedWeights):
        def op_weights(self) -> tuple[Any, ...]:
            return tuple(2 * t if t is self.w2_scale_2 else t for t in super().op_weights())

    batch = make_batch(CASE)
    w = made_known(new_layer(), *batch)
    other = Doubled(**{field.name: getattr(w, field.name) for field in dataclasses.fields(w)})
    check_same(other, *batch)
    check_same(other, *batch)


@pytest.mark.parametrize("change", [{"num_experts": float}, {"local_expert_offset": float}, {"num_experts": list}])
def test_names_of_other_types_get_the_errors_of_the_op(change: dict[str, Any]) -> None:
    batch = make_batch(CASE)
    w = made_known(new_layer(), *batch)
    name, kind = next(iter(change.items()))
    value = getattr(w, name)
    other = dataclasses.replace(w)
    object.__setattr__(other, name, [value] if kind is list else kind(value))
    assert not runs_accepted(other, *batch)
    assert error_of(lambda: moe.fused_moe_routed(*batch, other)) == error_of(call_op, other, *batch)


def test_names_that_change_during_a_call_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, w = make_batch(CASE), new_layer()
    op = fused._ROUTED[w.scheme]
    total = next(totals)

    def changed(*args: Any) -> Tensor:
        object.__setattr__(w, "num_experts", total)
        return op(*args)

    monkeypatch.setitem(fused._ROUTED, w.scheme, changed)
    before = accepted.key_of(w)
    moe.fused_moe_routed(*batch, w)
    assert w.num_experts == total and not {before, accepted.key_of(w)} & accepted._KEPT.keys()


def test_threads_at_once() -> None:
    """Layers with several names are first called, and called again, by threads that do not wait for each other."""
    batch = make_batch(CASE)
    layers = [new_layer(raw=make_raw(dataclasses.replace(CASE, seed=seed))) for seed in range(6)]
    wanted = [call_op(w, *batch) for w in layers]
    wrong: list[Any] = []
    ready = threading.Barrier(4)

    def calls(first: int) -> None:
        ready.wait()
        with torch.no_grad():
            for i in range(first, first + 60):
                one = i % len(layers)
                if not moe.fused_moe_routed(*batch, layers[one]).equal(wanted[one]):
                    wrong.append(one)

    threads = [threading.Thread(target=calls, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for w in layers:
        made_known(w, *batch)
    test_numbers_are_of_one_set_of_names_each()


def test_gradients_are_off_by_thread() -> None:
    x, ids, weights = make_batch(CASE)
    w = made_known(new_layer(), x, ids, weights)
    found: list[Any] = []

    def trains() -> None:
        mine = x.clone().requires_grad_()
        moe.fused_moe_routed(mine, ids, weights, w).float().sum().backward()
        found.append(mine.grad)

    thread = threading.Thread(target=trains)
    thread.start()
    thread.join()
    assert found and found[0].abs().sum() > 0


PROCESS = """
import atexit, os, sys, threading
import torch
import torch_moe_ops as moe
from torch_moe_ops.prepared import accepted

torch.set_num_threads(1)
raw = moe.quantize_experts(torch.randn(4, 128, 64).bfloat16(), torch.randn(4, 64, 64).bfloat16(), scheme="nvfp4")
w = moe.prepare(raw, act_format="none", backend="cpu")
batch = torch.randn(3, 64).bfloat16(), torch.randint(0, 4, (3, 2)).int(), torch.rand(3, 2)

def call():
    with torch.no_grad():
        return moe.fused_moe_routed(*batch, w)

class Last:
    def __del__(self):
        if call is not None:
            call()

accepted._LEARNING.acquire()  # as where another thread learns while this one forks
if os.fork() == 0:
    first = call()
    os._exit(0 if call().equal(first) else 3)
assert os.wait()[1] == 0
accepted._LEARNING.release()
first = call()
assert call().equal(first)
with torch.no_grad():
    assert accepted.run(w, accepted.key_of(w), *batch) is not None
if os.fork() == 0:
    os._exit(0 if call().equal(first) else 3)
assert os.wait()[1] == 0
atexit.register(call)
sys.last = Last()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forks_and_the_end_of_a_process() -> None:
    done = subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_backends_without_it_pay_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(CASE)
    w = moe.prepare(make_raw(CASE), act_format=CASE.act_format, backend="reference")

    def fails(*args: Any) -> Any:
        raise AssertionError("asked")

    for name in ("run", "learned"):
        monkeypatch.setattr(accepted, name, fails)
    moe.fused_moe_routed(*batch, w)
    assert BACKENDS["reference"].accepted is None
