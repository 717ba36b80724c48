"""Calls of a layer that are like an accepted one are compared, not checked: the same bits, the same errors, and nothing
that anybody misses. `_op` is the op itself, called each time, which every test compares with."""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from every_layer import layer_of, raw_of
from paths import ROOT
from problems import Case, make_batch, make_raw
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS, cpu, cpu_accepted
from torch_moe_ops.core.call import WEIGHT_FIELDS
from torch_moe_ops.core.checked_calls import checked_call
from torch_moe_ops.core.schemas import arguments
from torch_moe_ops.core.schemes import SCHEMES
from torch_moe_ops.prepared import accepted, fused

CASE = Case(experts=4, top_k=2)
MADE_AT_EACH_CALL = {"fp8", "int8"}  # alphas, where there are input scales: such calls are checked as ever
_totals = itertools.count(1000)


@pytest.fixture(autouse=True, params=[False, True], ids=["gradients off", "gradients on"])
def _gradients(request: pytest.FixtureRequest) -> Iterator[None]:
    with torch.set_grad_enabled(request.param):
        yield


def _layer(case: Case = CASE, raw: moe.RawWeights | None = None) -> moe.PreparedWeights:
    """A layer with names that no other test has, as what is known of names is never forgotten."""
    w = moe.prepare(raw or make_raw(case), act_format=case.act_format, backend="cpu")
    return dataclasses.replace(w, num_experts=next(_totals))


def _op(w: moe.PreparedWeights, *batch: Any) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accepted, "TAKEN_BY", ())
        return moe.fused_moe_routed(*batch, w)


def _known(w: moe.PreparedWeights, *batch: Tensor) -> moe.PreparedWeights:
    """After a call that was accepted."""
    moe.fused_moe_routed(*batch, w)
    assert _ran(w, *batch)
    return w


def _ran(w: moe.PreparedWeights, *batch: Any) -> bool:
    """Whether a call is run as one that is like an accepted one."""
    key = accepted.key_of(w)
    return key is not None and accepted.run(w, key, *batch) is not None


def _error(call: Callable[..., Tensor], *args: Any) -> tuple[type, str]:
    with pytest.raises(Exception) as raised:
        call(*args)
    return raised.type, str(raised.value)


def _same(w: moe.PreparedWeights, *batch: Any) -> None:
    """A call does what the op does, error or not."""
    try:
        wanted = _op(w, *batch)
    except Exception:
        assert _error(lambda: moe.fused_moe_routed(*batch, w)) == _error(_op, w, *batch)
        return
    result = moe.fused_moe_routed(*batch, w)
    assert result.equal(wanted) and result.dtype is wanted.dtype and result.stride() == wanted.stride()
    assert result.is_inference() == wanted.is_inference() and result.requires_grad == wanted.requires_grad
    assert type(result) is type(wanted)


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


class _SeenFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


# ---- what is run so


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_the_same_bits_as_the_op_for_other_tokens(scheme: str) -> None:
    case, zero = layer_of("cpu", scheme)
    w = _layer(case, raw_of(case, zero))
    x, ids, weights = make_batch(case)
    moe.fused_moe_routed(x, ids, weights, w)
    assert _ran(w, x, ids, weights) == (scheme not in MADE_AT_EACH_CALL)
    for tokens in (1, 2, len(x)):
        batch = x[:tokens].flip(0).contiguous(), ids[:tokens].contiguous(), weights[:tokens].contiguous()
        _same(w, *batch)
        _same(w, batch[0], batch[1].long(), batch[2].double())
        _same(w, batch[0], batch[1][:, :1].contiguous(), batch[2][:, :1].contiguous())


@pytest.mark.parametrize("act_format", SCHEMES["nvfp4"].act_formats)
def test_activation_formats_are_kept(act_format: str) -> None:
    case = dataclasses.replace(CASE, act_format=act_format)
    batch = make_batch(case)
    w = _layer(case)
    moe.fused_moe_routed(*batch, w)
    _same(w, *batch)


def test_the_first_call_is_checked_and_the_next_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(CASE)
    w = _layer()
    wanted = _op(w, *batch)
    assert not _ran(w, *batch)
    moe.fused_moe_routed(*batch, w)
    monkeypatch.setattr(fused, "_ROUTED", {})  # the op is not there any more
    assert moe.fused_moe_routed(*batch, w).equal(wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("out_dtype", [None, torch.float32, torch.bfloat16])
def test_dtypes(dtype: torch.dtype, out_dtype: torch.dtype | None) -> None:
    x, ids, weights = make_batch(CASE)
    w = _known(_layer(), x, ids, weights)
    for _ in range(3):
        out = moe.fused_moe_routed(x.to(dtype), ids, weights, w, out_dtype=out_dtype)
        assert out.dtype is (out_dtype or dtype)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(accepted, "TAKEN_BY", ())
            assert out.equal(moe.fused_moe_routed(x.to(dtype), ids, weights, w, out_dtype=out_dtype))
    assert _ran(w, x.to(dtype), ids, weights) == (out_dtype is None or dtype is torch.bfloat16)


def test_options_are_the_ops() -> None:
    x, ids, weights = make_batch(CASE)
    w = _known(_layer(), x, ids, weights)
    out = torch.empty_like(x)
    assert moe.fused_moe_routed(x, ids, weights, w, out=out) is out
    assert out.equal(_op(w, x, ids, weights))
    for wrong in ("float32", [torch.float32], torch.int8):
        with pytest.raises(Exception, match="nvfp4_moe_routed"):
            moe.fused_moe_routed(x, ids, weights, w, out_dtype=wrong)  # type: ignore[arg-type]


def test_more_dimensions_views_and_no_tokens() -> None:
    x, ids, weights = make_batch(CASE)
    w = _known(_layer(), x, ids, weights)
    wide = torch.cat([x, x], 1)[:, : x.shape[1]]
    turned = ids.t().contiguous().t(), weights.t().contiguous().t()
    assert not wide.is_contiguous() and not turned[0].is_contiguous()
    for batch in ((wide, ids, weights), (x, *turned), (x, turned[0], weights), (x, ids, turned[1])):
        assert not _ran(w, *batch)
        _same(w, *batch)
    _same(w, torch._neg_view(x), ids, weights)
    one = torch.cat([x, x], 1)[:1, : x.shape[1]], ids[:1], weights[:1]  # contiguous, whatever its rows are apart
    assert one[0].stride() == (2 * x.shape[1], 1) and _ran(w, *one)
    _same(w, *one)
    assert moe.fused_moe_routed(x[:0], ids[:0], weights[:0], w).shape == (0, x.shape[1])
    assert moe.fused_moe_routed(x[None], ids[None], weights[None], w).equal(_op(w, x, ids, weights)[None])


def test_inference_mode() -> None:
    x, ids, weights = make_batch(CASE)
    w = _known(_layer(), x, ids, weights)
    with torch.inference_mode():
        batch = x.clone(), ids.clone(), weights.clone()
        assert _ran(w, *batch) and _ran(w, x, ids, weights)
        _same(w, *batch)
        _same(w, x, ids, weights)
        assert moe.fused_moe_routed(*batch, w).is_inference()
    _same(w, *batch)
    assert not moe.fused_moe_routed(*batch, w).is_inference()


def test_settings_of_the_process_count() -> None:
    batch = make_batch(CASE)
    w = _known(_layer(), *batch)
    isa, threads = torch.ops.moeq_C.cpu_isa(), torch.get_num_threads()
    try:
        torch.ops.moeq_C.use_cpu_isa("portable")
        torch.set_num_threads(3)
        _same(w, *batch)
    finally:
        torch.ops.moeq_C.use_cpu_isa(isa)
        torch.set_num_threads(threads)
    with torch.autocast("cpu", torch.bfloat16):
        _same(w, batch[0].float(), *batch[1:])
        _same(w, *batch)


# ---- other arguments


def _bad(x: Tensor, ids: Tensor, weights: Tensor) -> dict[str, tuple[Any, Any, Any]]:
    return {
        "hidden size": (x[:, :-16].contiguous(), ids, weights),
        "one dimension": (x[0], ids, weights),
        "dtype": (x.int(), ids, weights),
        "ids of fewer tokens": (x, ids[:-1], weights),
        "ids and weights of fewer tokens": (x, ids[:-1], weights[:-1]),
        "ids of one dimension": (x, ids[:, 0].contiguous(), weights),
        "ids in float": (x, ids.float(), weights),
        "ids in int16": (x, ids.short(), weights),
        "no columns": (x, ids[:, :0], weights[:, :0]),
        "weights of fewer columns": (x, ids, weights[:, :-1].contiguous()),
        "weights turned": (x, ids, weights.t().contiguous()),
        "weights in int": (x, ids, weights.int()),
        "no tensor": (x, ids, None),
        "no ids": (x, None, weights),
        "no hidden states": (None, ids, weights),
        "a list": (x.tolist(), ids, weights),
        "another device": (x.to("meta"), ids, weights),
        "ids on another device": (x, ids.to("meta"), weights),
        "sparse": (x.to_sparse(), ids, weights),
        "sparse weights": (x, ids, weights.to_sparse()),
        "nested": (torch.nested.nested_tensor(list(x)), ids, weights),
        "bits": (x, torch.empty(ids.shape, dtype=torch.uint8).view(torch.bits8), weights),
        "memory is gone": (_without_memory(x), ids, weights),
    }


def _without_memory(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("name", sorted(_bad(*make_batch(CASE))))
def test_bad_arguments_get_the_errors_of_the_op(name: str) -> None:
    batch = make_batch(CASE)
    w = _known(_layer(), *batch)
    bad = _bad(*batch)[name]
    assert _error(lambda: moe.fused_moe_routed(*bad, w)) == _error(_op, w, *bad)


# ---- other layers


def test_names_are_all_that_an_op_is_given_beside_tensors() -> None:
    for scheme, facts in SCHEMES.items():
        op = f"{facts.op_prefix}moe_routed"
        schema = getattr(torch.ops.moeq, op).default._schema
        plain = {a.name for a in schema.arguments if "Tensor" not in str(a.type)}
        assert plain - {"out_dtype", "element"} <= set(accepted.NAMES), scheme
        assert set(arguments(op)[0]) - plain - set(cpu_accepted._TOKENS) <= set(WEIGHT_FIELDS), scheme
    assert "scheme" in accepted.NAMES  # which says the element
    assert {"cpu"} == accepted.TAKEN_BY


@pytest.mark.parametrize(
    "change",
    [
        {"activation": "gelu_tanh"},
        {"activation": "silu", "swiglu_limit": 0.25},
        {"swiglu_alpha": 0.5},
        {"swiglu_beta": 1.0},
        {"local_expert_offset": 1},
        {"num_experts": 1},
        {"num_experts": 0},
        {"act_format": "nvfp4"},
        {"act_format": "fp4"},
        {"backend": "reference"},
        {"backend": "triton"},
        {"scheme": "mxfp4"},
        {"scheme": "int4"},
        {"weight_policy": "decode"},
        {"router_weight_on_input": True},
    ],
    ids=str,
)
def test_another_name_is_another_call(change: dict[str, Any]) -> None:
    batch = make_batch(CASE)
    w = _known(_layer(), *batch)
    other = dataclasses.replace(w, **change)
    assert not _ran(other, *batch) or other.num_experts == 0  # names that another test has too
    _same(other, *batch)
    _same(other, *batch)
    for name, value in change.items():  # which a frozen dataclass does not stop
        object.__setattr__(w, name, value)
    _same(w, *batch)


def test_layers_of_several_sizes_with_the_same_names() -> None:
    small, large = (_layer(Case(experts=4, top_k=2, inter=inter)) for inter in (64, 128))
    large = dataclasses.replace(large, num_experts=small.num_experts)
    batch = make_batch(CASE)
    for _ in range(3):
        for w in (small, large):
            _same(w, *batch)
    assert _ran(small, *batch) and _ran(large, *batch)
    mixed = dataclasses.replace(small, w2=large.w2)
    assert not _ran(mixed, *batch)
    _same(mixed, *batch)


def test_a_tensor_more_or_less_or_in_another_place_is_another_call() -> None:
    """Of biases as long as each other, and of alphas that may be there or not."""
    case = Case("mxfp4", "none", experts=4, top_k=2, hidden=128, inter=64, bias=True)
    batch = make_batch(case)
    w = _layer(case)
    assert w.w13_bias is not None and w.w2_bias is not None and w.w13_bias.shape == w.w2_bias.shape
    first = _known(dataclasses.replace(w, w2_bias=None), *batch)
    for w13_bias, w2_bias in itertools.product((None, w.w13_bias), (None, w.w2_bias)):
        other = dataclasses.replace(first, w13_bias=w13_bias, w2_bias=w2_bias)
        if (w13_bias, w2_bias) != (first.w13_bias, None):
            assert not _ran(other, *batch)
        _same(other, *batch)
        _same(other, *batch)
    for extra in ({"g1_alphas": torch.full((4,), 2.0)}, {"a1_gscale": torch.tensor(2.0)}, {"w13_zero_point": first.w2}):
        other = dataclasses.replace(first, **extra)
        assert not _ran(other, *batch)
        _same(other, *batch)  # which has no such argument


@pytest.mark.parametrize("duplicate", ["copy", "deepcopy", "save", "replace", "to"])
def test_copies_are_layers_of_their_own(duplicate: str) -> None:
    batch = make_batch(CASE)
    w = _known(_layer(), *batch)
    other = {"copy": copy.copy, "deepcopy": copy.deepcopy, "save": _saved, "replace": dataclasses.replace}.get(
        duplicate, lambda w: w.to("cpu")
    )(w)
    assert vars(other).keys() == vars(w).keys()
    _same(other, *batch)
    other.w13.bitwise_xor_(1)
    _same(other, *batch)
    _same(w, *batch)


def _saved(w: moe.PreparedWeights) -> moe.PreparedWeights:
    file = io.BytesIO()
    torch.save(w, file)
    file.seek(0)
    loaded: moe.PreparedWeights = torch.load(file, weights_only=False)
    return loaded


# ---- weights that change between two calls


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_what_is_written_into_weights_is_seen(scheme: str) -> None:
    """Also where the kernels get numbers that are made of several tensors."""
    case, zero = layer_of("cpu", scheme)
    w = _layer(case, raw_of(case, zero))
    batch = make_batch(case)
    before = moe.fused_moe_routed(*batch, w)
    _same(w, *batch)
    dataclasses.replace(w, num_experts=case.experts).update_(raw_of(case, zero, seed=1))  # in place: w has the tensors
    _same(w, *batch)
    assert not moe.fused_moe_routed(*batch, w).equal(before)
    for tensor in w.named_op_weights().values():
        if tensor is not None and tensor.dtype is torch.float32:
            tensor.mul_(0.5)
            _same(w, *batch)


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "other data": lambda t: setattr(t, "data", t.clone().fill_(1)),
    "other data, longer": lambda t: setattr(t, "data", torch.cat([t, t])),
    "other data, another dtype": lambda t: setattr(t, "data", _of_another_dtype(t)),
    "the same memory, another dtype": lambda t: setattr(t, "data", t.detach().view(_another(t.dtype))),
    "the same memory, another shape": lambda t: t.set_(t.untyped_storage(), 0, (*t.shape[:-1][::-1], t.shape[-1])),
    "the same memory, half as long": lambda t: t.set_(t.untyped_storage(), 0, (t.shape[0] // 2, *t.shape[1:])),
    "the same memory, from the second expert on": lambda t: t.set_(
        torch.cat([t, t]).untyped_storage(), t[0].numel(), tuple(t.shape)
    ),
    "other strides": lambda t: setattr(t, "data", t.movedim(0, -1).contiguous().movedim(-1, 0)),
    "every other element": lambda t: setattr(t, "data", torch.stack([t, t], -1)[..., 0]),
    "fewer experts": lambda t: t.resize_(t.shape[0] - 1, *t.shape[1:]),
    "nothing": lambda t: t.resize_(0),
    "no memory": lambda t: t.untyped_storage().resize_(0),
    "some memory": lambda t: t.untyped_storage().resize_(t.untyped_storage().nbytes() // 2),
    "written": lambda t: t.zero_(),
    "a gradient wanted": lambda t: t.requires_grad_() if t.is_floating_point() and t.element_size() > 1 else None,
}


def _another(dtype: torch.dtype) -> torch.dtype:
    return {torch.uint8: torch.int8, torch.float8_e4m3fn: torch.float8_e5m2, torch.float32: torch.int32}[dtype]


def _of_another_dtype(t: Tensor) -> Tensor:
    return t.to({torch.float32: torch.float64}.get(t.dtype, torch.float32))


@pytest.mark.parametrize(
    "field", ["w13", "w13_scale", "g1_alphas", "w13_bias", "w2", "w2_scale", "g2_alphas", "w2_bias"]
)
@pytest.mark.parametrize("name", CHANGES)
def test_weights_that_change_under_their_layer(name: str, field: str) -> None:
    """Tensors of a layer are the same objects, at the same addresses or not, and are something else."""
    case = Case(experts=4, top_k=2, bias=True)
    batch = make_batch(case)
    w = _known(_layer(case), *batch)
    CHANGES[name](getattr(w, field))
    _same(w, *batch)
    _same(w, *batch)


@pytest.mark.parametrize("field", WEIGHT_FIELDS)
def test_weights_that_are_replaced(field: str) -> None:
    case = Case(experts=4, top_k=2, bias=True)
    batch = make_batch(case)
    w = _known(_layer(case), *batch)
    before = getattr(w, field)
    replaced = [None, torch.ones(4), [1.0], 1]
    if before is not None:
        replaced += [before.clone().zero_(), before.tolist(), torch.nn.Parameter(before, False), before.to("meta")]
        replaced += [before.to_sparse()] if before.dtype is torch.float32 else []
    for value in replaced:
        object.__setattr__(w, field, value)
        _same(w, *batch)


def test_memory_that_is_freed_and_used_again() -> None:
    """Another layer with the same names in the place of one that is gone."""
    batch = make_batch(CASE)
    w = _known(_layer(), *batch)
    for seed in range(1, 20):
        total = w.num_experts
        del w
        w = dataclasses.replace(_layer(raw=make_raw(dataclasses.replace(CASE, seed=seed))), num_experts=total)
        assert _ran(w, *batch)
        _same(w, *batch)


def test_a_state_that_is_loaded() -> None:
    batch = make_batch(CASE)

    class Layer(torch.nn.Module):
        def __init__(self, w: moe.PreparedWeights) -> None:
            super().__init__()
            self.w = w
            for name, tensor in w.tensors().items():
                self.register_buffer(name, tensor)

    w, other = _known(_layer(), *batch), _layer(raw=make_raw(dataclasses.replace(CASE, seed=3)))
    Layer(w).load_state_dict(Layer(other).state_dict())
    assert _ran(w, *batch)
    _same(w, *batch)
    assert moe.fused_moe_routed(*batch, w).equal(_op(other, *batch))
    with torch.device("meta"):
        empty = Layer(dataclasses.replace(w, **{n: t.to("meta") for n, t in w.tensors().items()}))
    empty.load_state_dict(Layer(other).state_dict(), assign=True)
    _same(w, *batch)


# ---- gradients


def test_gradients_flow_through_a_known_layer() -> None:
    x, ids, weights = make_batch(CASE)
    w = _known(_layer(), x, ids, weights)
    with torch.enable_grad():
        assert _ran(w, x, ids, weights) and torch.is_grad_enabled()
        _same(w, x, ids, weights)
        for given in ((x.requires_grad_(), weights), (x.detach(), weights.requires_grad_())):
            assert not _ran(w, given[0], ids, given[1])
            moe.fused_moe_routed(given[0], ids, given[1], w).float().sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0
    assert weights.grad is not None and weights.grad.abs().sum() > 0
    with torch.no_grad():
        assert _ran(w, x, ids, weights)
        assert not moe.fused_moe_routed(x, ids, weights, w).requires_grad


def test_biases_that_want_gradients_get_them() -> None:
    case = Case(experts=4, top_k=2, bias=True)
    batch = make_batch(case)
    w = _known(_layer(case), *batch)
    assert w.w2_bias is not None
    w.w2_bias.requires_grad_()
    with torch.enable_grad():
        assert not _ran(w, *batch)
        moe.fused_moe_routed(*batch, w).float().sum().backward()
    assert w.w2_bias.grad is not None


def test_gradients_stay_on_where_a_call_fails() -> None:
    x, ids, weights = make_batch(CASE)
    w = _known(_layer(), x, ids, weights)
    w.w13.untyped_storage().resize_(0)
    with torch.enable_grad():
        with pytest.raises(RuntimeError, match="w13 must hold"):
            moe.fused_moe_routed(x, ids, weights, w)
        assert torch.is_grad_enabled()


def test_tangents_are_refused() -> None:
    x, ids, weights = make_batch(CASE)
    w = _known(_layer(), x, ids, weights)
    with torch.autograd.forward_ad.dual_level():
        assert not _ran(w, x, ids, weights)
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(RuntimeError, match="forward-mode"):
            moe.fused_moe_routed(dual, ids, weights, w)
    with pytest.raises(RuntimeError, match="forward-mode"):
        torch.func.jvp(lambda x: moe.fused_moe_routed(x, ids, weights, w), (x,), (x,))


# ---- whoever wants to see ops


def test_modes_see_the_op_and_nothing_else() -> None:
    batch = make_batch(CASE)
    w = _layer()
    for known in (False, True):
        with _Seen() as seen:
            _same(w, *batch)
        assert {n for n in seen.names if n.startswith("moeq")} == {"moeq::nvfp4_moe_routed"}
        with _SeenFunctions() as functions:
            out = moe.fused_moe_routed(*batch, w)
        assert [n for n in functions.names if "moe" in n] == ["moeq.nvfp4_moe_routed"] and out.equal(_op(w, *batch))
        with torch.profiler.profile() as profile:
            moe.fused_moe_routed(*batch, w)
        assert "moeq::nvfp4_moe_routed" in {event.name for event in profile.events()}
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as fake:
            out = moe.fused_moe_routed(*(fake.from_tensor(t) for t in batch), w)
            assert isinstance(out, torch._subclasses.FakeTensor)
            assert isinstance(moe.fused_moe_routed(*batch, w), torch._subclasses.FakeTensor)
        assert _ran(w, *batch) == known
        _known(w, *batch)


@pytest.mark.parametrize("known", [False, True])
def test_traces_see_the_op_and_nothing_else(known: bool) -> None:
    batch = make_batch(CASE)
    w = _layer()
    if known:
        _known(w, *batch)

    def layer(*given: Tensor) -> Tensor:
        return moe.fused_moe_routed(*given, w)

    def traced_op(*given: Tensor) -> Tensor:
        return _op(w, *given)

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
    assert _ran(w, *batch) == known
    exported = torch.export.export(_Module(layer), batch, strict=False)
    assert "nvfp4_moe_routed" in exported.graph_module.code and "moeq_C" not in exported.graph_module.code
    for fullgraph in (True, False):
        compiled = torch.compile(layer, fullgraph=fullgraph, backend="aot_eager")
        assert compiled(*batch).equal(_op(w, *batch))
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
    w = _layer()
    if known:
        _known(w, x, ids, weights)

    def layer(x: Tensor) -> Tensor:
        return moe.fused_moe_routed(x, ids, weights, w)

    both = torch.stack([x, -x])
    each = torch.stack([_op(w, one, ids, weights) for one in both])
    assert torch.func.vmap(layer)(both).equal(each)
    assert torch.func.functionalize(layer)(x).equal(each[0])
    with torch.enable_grad():
        grad = torch.func.grad(lambda x: layer(x).float().sum())(x)
        mine = x.clone().requires_grad_()
        _op(w, mine, ids, weights).float().sum().backward()
    assert grad.equal(mine.grad) and grad.abs().sum() > 0
    assert _ran(w, x, ids, weights) == known


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
    w = _known(_layer(), *batch.values())
    given = dict(batch)
    if field in given:
        given[field] = made(given[field])
    else:
        w = dataclasses.replace(w, **{field: made(getattr(w, field))})
    _Named.seen, _Quiet.seen = [], []
    out = moe.fused_moe_routed(*given.values(), w)
    ops = [n for n in (*_Named.seen, *_Quiet.seen) if "moe" in n]
    assert ops and all("nvfp4_moe_routed" in n and "_C" not in n for n in ops)
    assert torch.equal(out.as_subclass(Tensor), _op(w, *batch.values()).as_subclass(Tensor))


def test_no_key_of_the_dispatcher_leads_elsewhere() -> None:
    """The kernel on CPUs, a kernel of cpu_accepted.py, or on to the next key: nothing that a new torch brings."""
    for op in ("experts_accepted", "accept_experts"):
        for line in torch._C._dispatch_dump_table(f"moeq_C::{op}").strip().splitlines():
            key, _, what = line.partition(": ")
            own = "cpu_accepted.py" in what or (key == "CPU" and "ops.cpp" in what)
            assert own or what.startswith("fallthrough "), line


def test_the_compiled_op_refuses_what_it_does_not_know() -> None:
    batch = make_batch(CASE)
    w = _known(_layer(), *batch)
    number = accepted._KEPT[accepted.key_of(w)].number
    tensors = (*batch, *accepted._weights_of(w))
    op = torch.ops.moeq_C.experts_accepted
    with torch.no_grad():
        assert op(*tensors, number).equal(_op(w, *batch))
    with torch.no_grad():
        for unknown in (-1, 2047, 2048, 2**40):
            assert op(*tensors, unknown) is None
        assert op(batch[0].to("meta"), *tensors[1:], number) is None
    with torch.enable_grad():
        assert op(*tensors, number) is None


# ---- keeping


def test_keeping_raises_nothing_and_knows_nothing_then(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(CASE)
    w = _layer()

    def fails(*args: Any) -> Any:
        raise MemoryError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(accepted, "checked_call", fails)
        _same(w, *batch)
    assert not _ran(w, *batch)
    _same(w, *batch)
    assert _ran(w, *batch)


def test_tensors_that_are_made_of_those_of_a_layer_are_not_compared() -> None:
    """The kernels' terms of such a call are others' at the next one, even if they are like them."""
    batch = make_batch(CASE)
    w = _layer()
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
    w = _layer()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="topk_ids must have dtype"):
            moe.fused_moe_routed(x, ids.short(), weights, w)
    assert accepted.key_of(w) not in accepted._KEPT


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(CASE)
    layers = [_layer(Case(experts=4, top_k=2, inter=64 * i)) for i in range(1, accepted.MAX_TRIES + 3)]
    layers = [dataclasses.replace(w, num_experts=layers[0].num_experts) for w in layers]
    for w in layers:
        _same(w, *batch)
    assert [_ran(w, *batch) for w in layers] == [True] * accepted.MAX_TRIES + [False] * 2
    assert accepted._KEPT[accepted.key_of(layers[0])].tries == accepted.MAX_TRIES
    monkeypatch.setattr(accepted, "MAX_KEPT", len(accepted._KEPT))
    w, known = _layer(), len(accepted._KEPT)
    _same(w, *batch)
    assert not _ran(w, *batch) and len(accepted._KEPT) == known


def test_odd_calls_leave_room_for_others() -> None:
    x, ids, weights = make_batch(CASE)
    w = _layer()
    wide = torch.cat([x, x], 1)[:, : x.shape[1]]
    for _ in range(2 * accepted.MAX_TRIES):
        moe.fused_moe_routed(wide, ids, weights, w)
        moe.fused_moe_routed(x[:0], ids[:0], weights[:0], w)
        with torch.enable_grad():
            moe.fused_moe_routed(x.clone().requires_grad_(), ids, weights, w)
        with _Seen():
            moe.fused_moe_routed(x, ids, weights, w)
        torch.func.vmap(lambda x: moe.fused_moe_routed(x, ids, weights, w))(x[None])
    assert accepted.key_of(w) not in accepted._KEPT
    _known(w, x, ids, weights)


def test_numbers_are_of_one_set_of_names_each() -> None:
    numbers = [kept.number for kept in accepted._KEPT.values()]
    assert len(set(numbers)) == len(numbers)
    text = (ROOT / "csrc" / "cpu" / "accepted.h").read_text()
    assert f"kAcceptedNames = {accepted.MAX_KEPT};" in text and f"kAcceptedPerNames = {accepted.MAX_TRIES};" in text


def test_a_module_that_is_loaded_anew_gives_no_number_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(CASE)
    w = _known(_layer(), *batch)
    known = {kept.number for kept in accepted._KEPT.values()}
    monkeypatch.setattr(accepted, "_KEPT", {})
    for other in (dataclasses.replace(_layer(), local_expert_offset=1), w):
        assert not _ran(other, *batch)
        _same(other, *batch)
        _same(other, *batch)
        assert _ran(other, *batch)
    assert not {kept.number for kept in accepted._KEPT.values()} & known


def test_layers_of_another_class_are_not_compared() -> None:
    """They may give the op other tensors and names than their attributes."""

    class Doubled(moe.PreparedWeights):
        def op_weights(self) -> tuple[Any, ...]:
            return tuple(2 * t if t is self.w2_scale_2 else t for t in super().op_weights())

    batch = make_batch(CASE)
    w = _known(_layer(), *batch)
    other = Doubled(**{field.name: getattr(w, field.name) for field in dataclasses.fields(w)})
    _same(other, *batch)
    _same(other, *batch)


@pytest.mark.parametrize("change", [{"num_experts": float}, {"local_expert_offset": float}, {"num_experts": list}])
def test_names_of_other_types_get_the_errors_of_the_op(change: dict[str, Any]) -> None:
    batch = make_batch(CASE)
    w = _known(_layer(), *batch)
    name, kind = next(iter(change.items()))
    value = getattr(w, name)
    other = dataclasses.replace(w)
    object.__setattr__(other, name, [value] if kind is list else kind(value))
    assert not _ran(other, *batch)
    assert _error(lambda: moe.fused_moe_routed(*batch, other)) == _error(_op, other, *batch)


def test_names_that_change_during_a_call_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, w = make_batch(CASE), _layer()
    op = fused._ROUTED[w.scheme]
    total = next(_totals)

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
    layers = [_layer(raw=make_raw(dataclasses.replace(CASE, seed=seed))) for seed in range(6)]
    wanted = [_op(w, *batch) for w in layers]
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
        _known(w, *batch)
    test_numbers_are_of_one_set_of_names_each()


def test_gradients_are_off_by_thread() -> None:
    x, ids, weights = make_batch(CASE)
    w = _known(_layer(), x, ids, weights)
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
