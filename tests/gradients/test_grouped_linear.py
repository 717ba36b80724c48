"""moe.grouped_linear against dequantized weights, forward and backward, and as trainers compose it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from problems import Case, make_batch, make_raw
from tolerances import relative_l2
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.core.schemes import SCHEMES
from torch_moe_ops.gradients import weights
from torch_moe_ops.ops import grouped_linear as op

CASE = Case(experts=5, hidden=128, inter=96, dtype=torch.float32)
ENDS = (3, 3, 11, 12, 16)


def _expected(x: Tensor, matrices: Tensor) -> Tensor:
    """Rows behind the last offset are zero."""
    pieces = [x[a:b] @ m.T for a, b, m in zip((0, *ENDS[:-1]), ENDS, matrices, strict=True)]
    return torch.cat((*pieces, x.new_zeros(x.shape[0] - ENDS[-1], matrices.shape[1])))


def _prepared(case: Case, backend: str) -> moe.PreparedWeights:
    return moe.prepare(make_raw(case), act_format=case.act_format, backend=backend, weight_policy=case.weight_policy)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("activation", ["silu", "relu2_no_mul"])
def test_both_ways(scheme: str, backend: str, activation: str) -> None:
    case = replace(CASE, scheme=scheme, activation=activation, per_half=scheme == "nvfp4")
    acts = SCHEMES[scheme].act_formats
    fits = [a for a in acts if not moe.explain(make_raw(case), act_format=a, device="cpu").against[backend]]
    w = _prepared(replace(case, act_format=fits[0]), backend)
    for name, matrices in zip(("w13", "w2"), moe.dequantize_experts(make_raw(case)), strict=True):
        x = torch.randn(19, matrices.shape[2], requires_grad=True)
        out = moe.grouped_linear(x, w, torch.tensor(ENDS), projection=name)
        assert relative_l2(out, _expected(x.detach(), matrices)) <= 1e-6
        assert not out[16:].any()
        grad = torch.randn_like(out)
        out.backward(grad)
        assert relative_l2(x.grad, _expected(grad, matrices.transpose(1, 2))) <= 1e-6
        half = moe.grouped_linear(x.detach().bfloat16(), w, torch.tensor(ENDS), projection=name)
        assert half.dtype == torch.bfloat16
        assert relative_l2(half, _expected(x.detach().bfloat16().float(), matrices)) <= 3e-3


def test_gradgradcheck_by_adjoint() -> None:
    """The derivative of the derivative is the op again: <grad, J v> = <J' grad, v>, twice."""
    w = _prepared(CASE, "cpu")
    x = torch.randn(19, CASE.hidden, requires_grad=True)
    grad = torch.randn(19, 2 * CASE.inter, requires_grad=True)
    offsets = torch.tensor(ENDS, dtype=torch.int32)
    out = moe.grouped_linear(x, w, offsets)
    (first,) = torch.autograd.grad(out, x, grad, create_graph=True)
    v = torch.randn_like(x)
    (second,) = torch.autograd.grad(first, grad, v)
    torch.testing.assert_close(second, moe.grouped_linear(v, w, offsets))


@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("policy", ["packed", "folded"])
def test_policies(policy: str, scheme: str) -> None:
    from straight_through import weights_of

    case = replace(CASE, scheme=scheme, act_format="fp8", weight_policy=policy)
    w = _prepared(case, "reference")
    x = torch.randn(19, CASE.hidden)
    expected = _expected(x, weights_of(make_raw(case), policy)[0])
    assert relative_l2(moe.grouped_linear(x, w, torch.tensor(ENDS)), expected) <= 1e-6


def test_pieces_and_no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    w = _prepared(CASE, "cpu")
    x, ends = torch.randn(19, CASE.inter), torch.tensor(ENDS)
    whole = moe.grouped_linear(x, w, ends)
    monkeypatch.setattr(weights, "CHUNK_ELEMENTS", 2 * CASE.hidden * CASE.inter)
    assert relative_l2(moe.grouped_linear(x, w, ends), whole) <= 1e-6
    real = op.linear_rows
    monkeypatch.setattr(op, "linear_rows", lambda x, ends, host, *rest: real(x, ends, None, *rest))
    assert relative_l2(moe.grouped_linear(x, w, ends), whole) <= 1e-6


@pytest.mark.parametrize("ends", [(3, 2, 4, 5, 6), (0, 1, 2, 3, 20), (-1, 0, 0, 0, 0)])
def test_offsets_that_are_none(ends: tuple[int, ...]) -> None:
    with pytest.raises(RuntimeError, match="moeq::grouped_linear: offsets must ascend from 0 to at most 19"):
        moe.grouped_linear(torch.randn(19, CASE.hidden), _prepared(CASE, "cpu"), torch.tensor(ends))


def test_which_projection() -> None:
    w = _prepared(CASE, "cpu")
    ends = torch.zeros(5, dtype=torch.int32)
    assert moe.grouped_linear(torch.randn(4, 128), w, ends).shape == (4, 192)
    assert moe.grouped_linear(torch.randn(4, 96), w, ends).shape == (4, 128)
    assert moe.grouped_linear(torch.randn(0, 96), w, ends).shape == (0, 128)
    with pytest.raises(ValueError, match="projection must fit x"):
        moe.grouped_linear(torch.randn(4, 64), w, ends)
    square = _prepared(replace(CASE, inter=128), "cpu")
    with pytest.raises(ValueError, match="projection must be given"):
        moe.grouped_linear(torch.randn(4, 128), square, ends)
    assert moe.grouped_linear(torch.randn(4, 128), square, ends, projection="w2").shape == (4, 128)


def _composed(x: Tensor, ids: Tensor, weights: Tensor, w: moe.PreparedWeights) -> Tensor:
    """A layer as trainers compose it."""
    expert, order = ids.flatten().sort(stable=True)
    ends = torch.searchsorted(expert, torch.arange(1, w.num_local_experts + 1, dtype=torch.int32))
    token = order // ids.shape[1]
    gate, up = moe.grouped_linear(x[token], w, ends, projection="w13").chunk(2, 1)
    y = moe.grouped_linear(torch.nn.functional.silu(gate) * up, w, ends, projection="w2")
    return torch.zeros_like(x).index_add(0, token, y * weights.flatten()[order, None])


@pytest.mark.parametrize("compiled", [False, True])
def test_two_of_them_make_the_layer(compiled: bool) -> None:
    case = replace(CASE, tokens=33, top_k=3)
    w = _prepared(case, "cpu")
    x, ids, weights = make_batch(case)
    found = []
    torch._dynamo.reset()
    composed = torch.compile(_composed, fullgraph=True, backend="aot_eager") if compiled else _composed
    for run in (composed, lambda *a: moe.fused_moe_routed(*a[:3], a[3])):
        leaves = x.clone().requires_grad_(), weights.clone().requires_grad_()
        out = run(leaves[0], ids, leaves[1], w)
        out.square().sum().backward()
        found.append((out.detach(), *(leaf.grad for leaf in leaves)))
    assert all(relative_l2(a, b) <= 1e-5 for a, b in zip(*found, strict=True))
