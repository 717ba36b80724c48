"""What tests of calls like an accepted one share. `call_op` is the op itself, called each time, to compare with."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from problems import Case, make_raw
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import torch_moe_ops as moe
from torch_moe_ops.prepared import accepted

CASE = Case(experts=4, top_k=2)
MADE_AT_EACH_CALL = {"fp8", "int8"}  # alphas, where there are input scales: such calls are checked as ever
totals = itertools.count(1000)


@pytest.fixture(autouse=True, params=[False, True], ids=["gradients off", "gradients on"])
def gradients(request: pytest.FixtureRequest) -> Iterator[None]:
    with torch.set_grad_enabled(request.param):
        yield


def new_layer(case: Case = CASE, raw: moe.RawWeights | None = None) -> moe.PreparedWeights:
    """A layer with names that no other test has, as what is known of names is never forgotten."""
    w = moe.prepare(raw or make_raw(case), act_format=case.act_format, backend="cpu")
    return dataclasses.replace(w, num_experts=next(totals))


def call_op(w: moe.PreparedWeights, *batch: Any) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accepted, "TAKEN_BY", ())
        return moe.fused_moe_routed(*batch, w)


def made_known(w: moe.PreparedWeights, *batch: Tensor) -> moe.PreparedWeights:
    """After a call that was accepted."""
    moe.fused_moe_routed(*batch, w)
    assert runs_accepted(w, *batch)
    return w


def runs_accepted(w: moe.PreparedWeights, *batch: Any) -> bool:
    """Whether a call is run as one that is like an accepted one."""
    key = accepted.key_of(w)
    return key is not None and accepted.run(w, key, *batch) is not None


def error_of(call: Callable[..., Tensor], *args: Any) -> tuple[type, str]:
    with pytest.raises(Exception) as raised:
        call(*args)
    return raised.type, str(raised.value)


def check_same(w: moe.PreparedWeights, *batch: Any) -> None:
    """A call does what the op does, error or not."""
    try:
        wanted = call_op(w, *batch)
    except Exception:
        assert error_of(lambda: moe.fused_moe_routed(*batch, w)) == error_of(call_op, w, *batch)
        return
    result = moe.fused_moe_routed(*batch, w)
    assert result.equal(wanted) and result.dtype is wanted.dtype and result.stride() == wanted.stride()
    assert result.is_inference() == wanted.is_inference() and result.requires_grad == wanted.requires_grad
    assert type(result) is type(wanted)


class SeenOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


class SeenFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))
