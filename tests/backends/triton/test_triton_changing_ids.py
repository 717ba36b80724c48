"""Ids that change under a call of the Triton engine: the result may be anything, but every access is in range.

In Triton's interpreter, where a test sees every address: ids change after each load of them, and what the schedule
leaves unwritten holds numbers of all sizes.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton.runtime import interpreter
from triton_cases import empty_output, make_call, relative_error

from torch_moe_ops.backends.triton_engine import launch
from torch_moe_ops.core.call import ExpertsCall

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),  # numpy, of whatever was in memory
]


class Watch:
    """Checks the address of every load and store of a kernel against its arguments; `changing` changes when read."""

    def __init__(self, seed: int, experts: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.experts = experts
        self.changing: Tensor | None = None
        self.ranges: list[tuple[int, int]] = []
        self.reads = 0

    def see(self, arguments: list[Any]) -> None:
        tensors = [a for a in arguments if isinstance(a, Tensor)]
        self.ranges = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors]

    def check(self, pointers: Any, mask: Any) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        used = pointers.data[mask.data]
        inside = np.zeros(used.shape, dtype=bool)
        for first, end in self.ranges:
            inside |= (used >= first) & (used + np.uint64(size) <= end)
        assert inside.all(), f"{(~inside).sum()} of {inside.size} addresses are in no argument"

    def change(self, pointers: Any) -> None:
        """New ids after a load of some."""
        if self.changing is None:
            return
        first = self.changing.data_ptr()
        if first <= pointers.data.flat[0] < first + self.changing.numel() * self.changing.element_size():
            self.reads += 1
            self.changing.random_(-2, self.experts + 2, generator=self.generator)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Watches every kernel from here on; buffers of the schedule begin with rubbish."""
    watch = Watch(seed=0, experts=4)
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    begin, make = executor._init_args_hst, launch.make_buffers
    load, store = builder.create_masked_load, builder.create_masked_store

    def begin_and_see(self: Any, arguments: Any, options: Any) -> Any:
        on_host = begin(self, arguments, options)
        watch.see([*on_host[0], *on_host[1].values()])
        return on_host

    def watched_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        watch.check(pointers, mask)
        loaded = load(self, pointers, mask, *rest)
        watch.change(pointers)
        return loaded

    def watched_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        watch.check(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def make_of_rubbish(*arguments: Any) -> Any:
        buffers = make(*arguments)
        for made in (buffers.row_slot, buffers.table):
            made.random_(-(2**31), 2**31 - 1, generator=watch.generator)
            small = torch.rand(made.shape, generator=watch.generator) < 0.7
            made[small] = torch.randint(-2, 12, made.shape, generator=watch.generator, dtype=torch.int32)[small]
        return buffers

    monkeypatch.setattr(executor, "_init_args_hst", begin_and_see)
    monkeypatch.setattr(builder, "create_masked_load", watched_load)
    monkeypatch.setattr(builder, "create_masked_store", watched_store)
    monkeypatch.setattr(launch, "make_buffers", make_of_rubbish)
    return watch


CASES: dict[str, dict[str, Any]] = {
    "none": {"scheme": "none"},
    "biases": {"scheme": "none", "bias": True, "foreign": True},
    "operands by slot": {"scheme": "nvfp4", "act_format": "nvfp4", "a1": "expert", "a2": "expert"},
    "scales of rows": {"scheme": "fp8", "act_format": "fp8"},
    "one token": {"scheme": "none", "tokens": 1},
    "many slots": {"scheme": "none", "tokens": 130, "top_k": 4},
}


def make(name: str, seed: int) -> ExpertsCall:
    return make_call(**{"tokens": 9, "hidden": 64, "inter": 32, "experts": 4, "seed": seed} | CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_every_access_is_in_range(watch: Watch, name: str) -> None:
    for seed in range(1 if name == "many slots" else 4):
        call = make(name, seed)
        watch.changing, watch.reads = call.topk_ids, 0
        launch.run_experts(call, empty_output(call))
        assert watch.reads >= 2 + call.topk_ids.shape[0], "the ids were not changed between two loads"


@pytest.mark.parametrize("name", CASES)
def test_results_do_not_depend_on_what_the_schedule_leaves_unwritten(watch: Watch, name: str) -> None:
    call = make(name, 0)
    call = call._replace(topk_weights=call.topk_weights.nan_to_num(1.0))
    out = empty_output(call)
    launch.run_experts(call, out)
    assert relative_error(out, call) < 4e-3


def test_the_watch_sees_an_address_out_of_range(watch: Watch) -> None:
    call = make("none", 0)
    with pytest.raises(interpreter.InterpreterError, match="addresses are in no argument"):
        launch.run_experts(call._replace(w2=call.w2[:2]), empty_output(call))
