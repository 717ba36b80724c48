"""Slots sorted by expert, and results that are handed on as they are: in few operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lora_cases import factors_of
from problems import Case, make_batch, make_raw
from torch.utils._python_dispatch import TorchDispatchMode

import torch_moe_ops as moe
from torch_moe_ops.gradients.pairs import sort_slots
from torch_moe_ops.ops import backward as backward_op
from torch_moe_ops.ops import lora as lora_op

LEAST, MOST = -(2**31), 2**31 - 1


class Operations(TorchDispatchMode):
    """Counts those that are more than another view of a tensor or a new one."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in ("view", "_unsafe_view", "reshape", "empty", "new_empty"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("offset", [0, 3, MOST - 2])
def test_slots_of_any_ids(offset: int) -> None:
    first = min(offset, MOST - 2)
    ids = torch.tensor([[LEAST, MOST, -1], [first, first + 1, offset - 1], [first + 2, first, 2], [LEAST + 1, 0, 7]])
    with Operations() as operations:
        slots = sort_slots(ids.int(), offset, 3)
    local = [i - offset if 0 <= i - offset < 3 else 3 for i in ids.flatten().tolist()]
    order = sorted(range(len(local)), key=lambda slot: (local[slot], slot))
    assert slots.order.tolist() == order
    assert slots.expert.tolist() == [local[slot] for slot in order]
    assert slots.token.tolist() == [slot // 3 for slot in order]
    assert slots.ends.tolist() == [sum(e <= expert for e in local) for expert in range(3)]
    assert len(operations.names) <= 8 + (offset != 0), operations.names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_pass_made_is_the_result(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not a copy of it, where it has the dtype."""
    case = Case(tokens=5, experts=2, top_k=2, hidden=32, inter=32, dtype=dtype, scheme="none")
    w, given = (
        moe.prepare(make_raw(case), act_format="none", backend="reference"),
        factors_of(make_raw(case), 1, 2, dtype),
    )
    x, ids, weights = make_batch(case)
    made: list[torch.Tensor] = []
    real, backward = lora_op.lora_layer, lora_op.lora_gradients
    monkeypatch.setattr(lora_op, "lora_layer", lambda *a: made.append(real(*a)) or made[-1])
    monkeypatch.setattr(lora_op, "lora_gradients", lambda *a: made.extend(found := backward(*a)) or found)
    leaves = [x.requires_grad_(), *(getattr(given, name).requires_grad_() for name in ("a13", "b13", "a2", "b2"))]
    out = moe.fused_moe_routed(leaves[0], ids, weights, w, lora=moe.Lora(*leaves[1:], scaling=0.5))
    found = torch.autograd.grad(out.sum(), leaves)
    results = [out, *found]
    same = [any(t is not None and t.data_ptr() == result.data_ptr() for t in made) for result in results]
    assert same == [t.dtype is torch.float32 for t in results]
    assert all(t.dtype is dtype for t in results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_a_plain_layer_are_handed_on(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tokens=5, experts=2, top_k=2, hidden=32, inter=32, dtype=dtype, scheme="none")
    w = moe.prepare(make_raw(case), act_format="none", backend="reference")
    x, ids, weights = make_batch(case)
    made: list[torch.Tensor] = []
    real = backward_op.experts_gradients
    monkeypatch.setattr(backward_op, "experts_gradients", lambda *a: made.extend(found := real(*a)) or found)
    out = moe.fused_moe_routed(x.requires_grad_(), ids, weights.requires_grad_(), w)
    found = torch.autograd.grad(out.sum(), (x, weights))
    same = [any(t is not None and t.data_ptr() == result.data_ptr() for t in made) for result in found]
    assert same == [t.dtype is torch.float32 for t in found]
