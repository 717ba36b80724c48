"""Calls that are like an accepted one: modes, traces, transforms and subclasses see the op, and nothing else."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accepted_calls import (
    CASE,
    SeenFunctions,
    SeenOps,
    call_op,
    check_same,
    gradients,  # noqa: F401 (a fixture of every test)
    made_known,
    new_layer,
    runs_accepted,
)
from problems import make_batch
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.prepared import accepted

# ---- whoever wants to see ops


def test_modes_see_the_op_and_nothing_else() -> None:
    batch = make_batch(CASE)
    w = new_layer()
    for known in (False, True):
        with SeenOps() as seen:
            check_same(w, *batch)
        assert {n for n in seen.names if n.startswith("moeq")} == {"moeq::nvfp4_moe_routed"}
        with SeenFunctions() as functions:
            out = moe.fused_moe_routed(*batch, w)
        assert [n for n in functions.names if "moe" in n] == ["moeq.nvfp4_moe_routed"] and out.equal(call_op(w, *batch))
        with torch.profiler.profile() as profile:
            moe.fused_moe_routed(*batch, w)
        assert "moeq::nvfp4_moe_routed" in {event.name for event in profile.events()}
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as fake:
            out = moe.fused_moe_routed(*(fake.from_tensor(t) for t in batch), w)
            assert isinstance(out, torch._subclasses.FakeTensor)
            assert isinstance(moe.fused_moe_routed(*batch, w), torch._subclasses.FakeTensor)
        assert runs_accepted(w, *batch) == known
        made_known(w, *batch)


@pytest.mark.parametrize("known", [False, True])
def test_traces_see_the_op_and_nothing_else(known: bool) -> None:
    batch = make_batch(CASE)
    w = new_layer()
    if known:
        made_known(w, *batch)

    def layer(*given: Tensor) -> Tensor:
        return moe.fused_moe_routed(*given, w)

    def traced_op(*given: Tensor) -> Tensor:
        return call_op(w, *given)

    make_fx = torch.fx.experimental.proxy_tensor.make_fx
    for mode in ("real", "fake", "symbolic"):
        given = {"tracing_mode": mode, "_allow_non_fake_inputs": True}
        for pre_dispatch in (False, True):
            graphs = [make_fx(f, pre_dispatch=pre_dispatch, **given)(*batch) for f in (layer, traced_op)]
            assert graphs[0].code == graphs[1].code and "nvfp4_moe_routed" in graphs[0].code
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", torch.jit.TracerWarning)
        scripts = [torch.jit.trace(f, batch, check_trace=False) for f in (layer, traced_op)]
    assert not any(issubclass(w.category, torch.jit.TracerWarning) for w in warned)  # that sizes were asked for
    kinds = [[node.kind() for node in s.graph.nodes()] for s in scripts]
    assert kinds[0] == kinds[1] and "moeq::nvfp4_moe_routed" in kinds[0]
    assert runs_accepted(w, *batch) == known
    exported = torch.export.export(_Module(layer), batch, strict=False)
    assert "nvfp4_moe_routed" in exported.graph_module.code and "moeq_C" not in exported.graph_module.code
    for fullgraph in (True, False):
        compiled = torch.compile(layer, fullgraph=fullgraph, backend="aot_eager")
        assert compiled(*batch).equal(call_op(w, *batch))
        torch._dynamo.reset()


class _Module(torch.nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Tensor) -> Tensor:
        return self.function(*given)


@pytest.mark.parametrize("known", [False, True])
def test_transforms_see_the_op(known: bool) -> None:
    x, ids, weights = make_batch(CASE)
    w = new_layer()
    if known:
        made_known(w, x, ids, weights)

    def layer(x: Tensor) -> Tensor:
        return moe.fused_moe_routed(x, ids, weights, w)

    both = torch.stack([x, -x])
    each = torch.stack([call_op(w, one, ids, weights) for one in both])
    assert torch.func.vmap(layer)(both).equal(each)
    assert torch.func.functionalize(layer)(x).equal(each[0])
    with torch.enable_grad():
        grad = torch.func.grad(lambda x: layer(x).float().sum())(x)
        mine = x.clone().requires_grad_()
        call_op(w, mine, ids, weights).float().sum().backward()
    assert grad.equal(mine.grad) and grad.abs().sum() > 0
    assert runs_accepted(w, x, ids, weights) == known


class _Named(Tensor):
    seen: list[str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _Named.seen.append(str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


class _Quiet(Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl
    inner: Tensor
    seen: list[str]

    @staticmethod
    def __new__(cls: Any, inner: Tensor) -> Any:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _Quiet.seen.append(func._schema.name)
        return func(*(a.inner if isinstance(a, _Quiet) else a for a in args), **(kwargs or {}))


def _named(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(_Named)


@pytest.mark.parametrize("made", [_named, _Quiet])
@pytest.mark.parametrize("field", ["hidden_states", "topk_ids", "topk_weights", "w13", "w2_scale"])
def test_subclasses_see_the_op_and_nothing_else(field: str, made: Any) -> None:
    batch = dict(zip(("hidden_states", "topk_ids", "topk_weights"), make_batch(CASE), strict=True))
    w = made_known(new_layer(), *batch.values())
    given = dict(batch)
    if field in given:
        given[field] = made(given[field])
    else:
        w = dataclasses.replace(w, **{field: made(getattr(w, field))})
    _Named.seen, _Quiet.seen = [], []
    out = moe.fused_moe_routed(*given.values(), w)
    ops = [n for n in (*_Named.seen, *_Quiet.seen) if "moe" in n]
    assert ops and all("nvfp4_moe_routed" in n and "_C" not in n for n in ops)
    assert torch.equal(out.as_subclass(Tensor), call_op(w, *batch.values()).as_subclass(Tensor))


def test_no_key_of_the_dispatcher_leads_elsewhere() -> None:
    """The kernel on CPUs, a kernel of cpu_accepted.py, or on to the next key: nothing that a new torch brings."""
    for op in ("experts_accepted", "accept_experts"):
        for line in torch._C._dispatch_dump_table(f"moeq_C::{op}").strip().splitlines():
            key, _, what = line.partition(": ")
            own = "cpu_accepted.py" in what or (key == "CPU" and "ops.cpp" in what)
            assert own or what.startswith("fallthrough "), line


def test_the_compiled_op_refuses_what_it_does_not_know() -> None:
    batch = make_batch(CASE)
    w = made_known(new_layer(), *batch)
    number = accepted._KEPT[accepted.key_of(w)].number
    tensors = (*batch, *accepted._weights_of(w))
    op = torch.ops.moeq_C.experts_accepted
    with torch.no_grad():
        assert op(*tensors, number).equal(call_op(w, *batch))
    with torch.no_grad():
        for unknown in (-1, 2047, 2048, 2**40):
            assert op(*tensors, unknown) is None
        assert op(batch[0].to("meta"), *tensors[1:], number) is None
    with torch.enable_grad():
        assert op(*tensors, number) is None
