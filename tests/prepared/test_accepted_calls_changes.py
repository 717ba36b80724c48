"""Calls that are like an accepted one: weights that have changed since are seen, and gradients flow."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accepted_calls import (
    CASE,
    call_op,
    check_same,
    gradients,  # noqa: F401 (a fixture of every test)
    made_known,
    new_layer,
    runs_accepted,
)
from every_layer import layer_of, raw_of
from problems import Case, make_batch, make_raw
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.core.call import WEIGHT_FIELDS
from torch_moe_ops.core.schemes import SCHEMES

# ---- weights that change between two calls


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_what_is_written_into_weights_is_seen(scheme: str) -> None:
    """Also where the kernels get numbers that are made of several tensors."""
    case, zero = layer_of("cpu", scheme)
    w = new_layer(case, raw_of(case, zero))
    batch = make_batch(case)
    before = moe.fused_moe_routed(*batch, w)
    check_same(w, *batch)
    dataclasses.replace(w, num_experts=case.experts).update_(raw_of(case, zero, seed=1))  # in place: w has the tensors
    check_same(w, *batch)
    assert not moe.fused_moe_routed(*batch, w).equal(before)
    for tensor in w.named_op_weights().values():
        if tensor is not None and tensor.dtype is torch.float32:
            tensor.mul_(0.5)
            check_same(w, *batch)


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
    w = made_known(new_layer(case), *batch)
    CHANGES[name](getattr(w, field))
    check_same(w, *batch)
    check_same(w, *batch)


@pytest.mark.parametrize("field", WEIGHT_FIELDS)
def test_weights_that_are_replaced(field: str) -> None:
    case = Case(experts=4, top_k=2, bias=True)
    batch = make_batch(case)
    w = made_known(new_layer(case), *batch)
    before = getattr(w, field)
    replaced = [None, torch.ones(4), [1.0], 1]
    if before is not None:
        replaced += [before.clone().zero_(), before.tolist(), torch.nn.Parameter(before, False), before.to("meta")]
        replaced += [before.to_sparse()] if before.dtype is torch.float32 else []
    for value in replaced:
        object.__setattr__(w, field, value)
        check_same(w, *batch)


def test_memory_that_is_freed_and_used_again() -> None:
    """Another layer with the same names in the place of one that is gone."""
    batch = make_batch(CASE)
    w = made_known(new_layer(), *batch)
    for seed in range(1, 20):
        total = w.num_experts
        del w
        w = dataclasses.replace(new_layer(raw=make_raw(dataclasses.replace(CASE, seed=seed))), num_experts=total)
        assert runs_accepted(w, *batch)
        check_same(w, *batch)


def test_a_state_that_is_loaded() -> None:
    batch = make_batch(CASE)

    class Layer(torch.nn.Module):
        def __init__(self, w: moe.PreparedWeights) -> None:
            super().__init__()
            self.w = w
            for name, tensor in w.tensors().items():
                self.register_buffer(name, tensor)

    w, other = made_known(new_layer(), *batch), new_layer(raw=make_raw(dataclasses.replace(CASE, seed=3)))
    Layer(w).load_state_dict(Layer(other).state_dict())
    assert runs_accepted(w, *batch)
    check_same(w, *batch)
    assert moe.fused_moe_routed(*batch, w).equal(call_op(other, *batch))
    with torch.device("meta"):
        empty = Layer(dataclasses.replace(w, **{n: t.to("meta") for n, t in w.tensors().items()}))
    empty.load_state_dict(Layer(other).state_dict(), assign=True)
    check_same(w, *batch)


# ---- gradients


def test_gradients_flow_through_a_known_layer() -> None:
    x, ids, weights = make_batch(CASE)
    w = made_known(new_layer(), x, ids, weights)
    with torch.enable_grad():
        assert runs_accepted(w, x, ids, weights) and torch.is_grad_enabled()
        check_same(w, x, ids, weights)
        for given in ((x.requires_grad_(), weights), (x.detach(), weights.requires_grad_())):
            assert not runs_accepted(w, given[0], ids, given[1])
            moe.fused_moe_routed(given[0], ids, given[1], w).float().sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0
    assert weights.grad is not None and weights.grad.abs().sum() > 0
    with torch.no_grad():
        assert runs_accepted(w, x, ids, weights)
        assert not moe.fused_moe_routed(x, ids, weights, w).requires_grad


def test_biases_that_want_gradients_get_them() -> None:
    case = Case(experts=4, top_k=2, bias=True)
    batch = make_batch(case)
    w = made_known(new_layer(case), *batch)
    assert w.w2_bias is not None
    w.w2_bias.requires_grad_()
    with torch.enable_grad():
        assert not runs_accepted(w, *batch)
        moe.fused_moe_routed(*batch, w).float().sum().backward()
    assert w.w2_bias.grad is not None


def test_gradients_stay_on_where_a_call_fails() -> None:
    x, ids, weights = make_batch(CASE)
    w = made_known(new_layer(), x, ids, weights)
    w.w13.untyped_storage().resize_(0)
    with torch.enable_grad():
        with pytest.raises(RuntimeError, match="w13 must hold"):
            moe.fused_moe_routed(x, ids, weights, w)
        assert torch.is_grad_enabled()


def test_tangents_are_refused() -> None:
    x, ids, weights = make_batch(CASE)
    w = made_known(new_layer(), x, ids, weights)
    with torch.autograd.forward_ad.dual_level():
        assert not runs_accepted(w, x, ids, weights)
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(RuntimeError, match="forward-mode"):
            moe.fused_moe_routed(dual, ids, weights, w)
    with pytest.raises(RuntimeError, match="forward-mode"):
        torch.func.jvp(lambda x: moe.fused_moe_routed(x, ids, weights, w), (x,), (x,))
