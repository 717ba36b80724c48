"""Tensors that begin between two addresses that GPU kernels can load from are copied, and only those."""

from __future__ import annotations

import pytest
import torch
from problems import Case, make_batch, make_raw

import torch_moe_ops as moe
from torch_moe_ops.core.call import FIELDS, ExpertsCall
from torch_moe_ops.ops import run
from torch_moe_ops.ops.alignment import ALIGNMENT, aligned, is_aligned


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, one element behind an aligned address."""
    whole = torch.empty(tensor.numel() + ALIGNMENT, dtype=tensor.dtype, device=tensor.device)
    start = next(i for i in range(1, ALIGNMENT) if (whole.data_ptr() + i * tensor.element_size()) % ALIGNMENT)
    return whole[start : start + tensor.numel()].copy_(tensor.reshape(-1)).view(tensor.shape)


def test_a_shifted_tensor_is_copied_and_another_is_not() -> None:
    tensor = torch.arange(24.0).reshape(4, 6)
    moved = aligned(shifted(tensor))
    assert is_aligned(moved) and torch.equal(moved, tensor)
    assert aligned(tensor) is tensor


def call_of(**given: torch.Tensor | None) -> ExpertsCall:
    return ExpertsCall(**{name: given.get(name) for name in FIELDS})


def test_every_tensor_of_a_call_is_looked_at() -> None:
    assert set(run._TENSORS) == {name for name, kind in ExpertsCall.__annotations__.items() if "Tensor" in str(kind)}
    for name in run._TENSORS:
        others = {n: torch.ones(8) for n in run._TENSORS if n != name}
        call, _ = run.with_aligned(call_of(**others, **{name: shifted(torch.arange(8.0))}), None)
        assert is_aligned(getattr(call, name)) and torch.equal(getattr(call, name), torch.arange(8.0))
        assert all(getattr(call, n) is t for n, t in others.items())


def test_router_logits_and_bias_are_looked_at() -> None:
    logits, bias = shifted(torch.arange(8.0)), shifted(torch.arange(4.0))
    _, routing = run.with_aligned(call_of(), (logits, bias, "default", 2))
    assert is_aligned(routing[0]) and is_aligned(routing[1]) and routing[2:] == ("default", 2)
    assert torch.equal(routing[0], logits)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4", "int4", "fp8", "none"])
def test_shifted_arguments_give_the_same_result(scheme: str) -> None:
    case = Case(scheme, experts=4, top_k=2, inter=64)
    raw = make_raw(case).to("cuda")
    w = moe.prepare(raw, act_format="none")
    x, ids, weights = (t.to("cuda") for t in make_batch(case))
    want = moe.fused_moe_routed(x, ids, weights, w)
    got = moe.fused_moe_routed(shifted(x), shifted(ids), shifted(weights), w)
    assert torch.equal(got, want)
