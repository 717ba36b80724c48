"""Parts of the gradient of experts: what layouts give back, pieces, products, and gradcheck of the whole in float64."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from problems import Case, make_batch, make_raw
from straight_through import weights_of
from tolerances import relative_l2
from torch import Tensor

from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.core.call import FIELDS, ExpertsCall
from torch_moe_ops.core.layout import Sizes
from torch_moe_ops.core.problem import Problem
from torch_moe_ops.core.schemes import SCHEMES
from torch_moe_ops.gradients import layer_pass, pairs, products, weights
from torch_moe_ops.gradients.experts import Gradients, Wanted, experts_gradients
from torch_moe_ops.oracle.reference import experts_reference

ALL = Wanted(True, True, True, True)
LAYER = Case(experts=5, hidden=128, inter=96, tokens=23, top_k=3)


def _call(case: Case, backend: str, **tensors: Any) -> tuple[ExpertsCall, Sizes]:
    """A checked call of a layer laid out by a backend, which need not run here, and its sizes as the op has them."""
    raw = make_raw(case)
    given = dict.fromkeys(FIELDS) | BACKENDS[backend].prepare(raw)
    given |= {"scheme": case.scheme, "act_format": case.act_format, "weight_policy": case.weight_policy}
    given |= {"activation": case.activation, "router_weight_on_input": False, "local_expert_offset": 0}
    given |= {"swiglu_alpha": 1.0, "swiglu_beta": 0.0, "swiglu_limit": float("inf")}
    if raw.w13_scale_2 is not None:
        alphas = raw.w13_scale_2.squeeze(1) if raw.w13_scale_2.shape[1] == 1 else raw.w13_scale_2
        given |= {"g1_alphas": alphas, "g2_alphas": raw.w2_scale_2}
    given |= tensors
    inter = BACKENDS[backend].layout.intermediate_size(SCHEMES[case.scheme], tuple(given["w2"].shape))
    return ExpertsCall(**given), Sizes(case.experts, case.hidden, inter, raw.is_gated, given["w13"].dtype)


def _layouts() -> list[Any]:
    found = []
    for name, backend in BACKENDS.items():
        for scheme in SCHEMES.values():
            for act in scheme.act_formats:
                for policy in scheme.policies if act == "fp8" else ("exact",):
                    case = replace(LAYER, scheme=scheme.name, act_format=act, weight_policy=policy)
                    problem = Problem(scheme.name, act, weight_policy=policy, hidden_size=128, intermediate_size=96)
                    if all(r.unmet(problem) is None for r in backend.requires if r.of_format or name in policy):
                        found.append(pytest.param(name, case, id=f"{name}-{scheme.name}-{act}-{policy}"))
    kept = {
        (p.values[0], p.values[1].scheme, p.values[1].weight_policy): p for p in found if _has_policy(*p.values[:2])
    }
    return list(kept.values())


def _has_policy(name: str, case: Case) -> bool:
    own = {"cuda_sm90_packed": "packed", "cuda_sm90_folded": "folded", "reference": case.weight_policy}
    return own.get(name, "exact") == case.weight_policy


@pytest.mark.parametrize(("backend", "case"), _layouts())
@pytest.mark.parametrize("activation", ["silu", "relu2_no_mul"])
def test_every_layout_gives_its_experts_back(backend: str, case: Case, activation: str) -> None:
    case = replace(case, activation=activation, per_half=case.scheme == "nvfp4")
    raw = make_raw(case)
    call, sizes = _call(case, backend)
    expected = weights_of(raw, case.weight_policy)
    some = slice(1, 4)
    found = weights.decode_experts(call, BACKENDS[backend], sizes, some, torch.float32)
    halves = 2 if raw.is_gated else 1
    w13 = found[0].unflatten(1, (halves, -1))
    torch.testing.assert_close(w13[:, :, : case.inter].flatten(1, 2), expected[0][some], rtol=3e-7, atol=0)
    torch.testing.assert_close(found[1][:, :, : case.inter], expected[1][some], rtol=3e-7, atol=0)
    assert not w13[:, :, case.inter :].any()  # padding
    assert not found[1][:, :, case.inter :].any()


def test_plain_weights_are_no_work_for_a_kernel() -> None:
    """Nor is room made for what it would write."""
    call, sizes = _call(replace(LAYER, scheme="none"), "triton")
    asked = replace(BACKENDS["triton"], dequantize=lambda *of: pytest.fail("it was asked"))
    w13, w2 = weights.decode_experts(call, asked, sizes, slice(1, 4), call.w13.dtype)
    assert w13.data_ptr() == call.w13[1].data_ptr()
    assert w2.data_ptr() == call.w2[1].data_ptr()


def _gradients(call: ExpertsCall, sizes: Sizes, backend: str, grad: Tensor) -> Gradients:
    return experts_gradients(call, BACKENDS[backend], sizes, grad, ALL)


def _batch(case: Case, seed: int = 3) -> dict[str, Tensor]:
    x, ids, weights = make_batch(case)
    return {"hidden_states": x, "topk_ids": ids, "topk_weights": weights}


def _biased(case: Case, backend: str) -> tuple[ExpertsCall, Sizes, Tensor]:
    raw = make_raw(case)
    call, sizes = _call(case, backend, **_batch(case))
    call = call._replace(w13_bias=raw.w13_bias, w2_bias=raw.w2_bias)
    return call, sizes, torch.randn(case.tokens, case.hidden, generator=torch.Generator().manual_seed(7))


def test_pieces_of_experts_and_rows_change_nothing_but_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(LAYER, dtype=torch.float32, bias=True, foreign=True)
    call, sizes, grad = _biased(case, "reference")
    whole = _gradients(call, sizes, "reference", grad)
    monkeypatch.setattr(weights, "CHUNK_ELEMENTS", 2 * 3 * case.hidden * case.inter)  # two experts
    monkeypatch.setattr(layer_pass, "PIECE_ELEMENTS", 4 * 192)  # four rows
    seen = []
    monkeypatch.setattr(layer_pass, "pieces", lambda *a: [seen.append(p) or p for p in pairs.pieces(*a)])
    for found, expected in zip(_gradients(call, sizes, "reference", grad), whole, strict=True):
        assert relative_l2(found, expected) <= 1e-6
    assert len(seen) > 6
    assert max(len(p.places) for p in seen) == 4


def test_where_the_device_may_not_be_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(LAYER, dtype=torch.float32, bias=True, foreign=True)
    call, sizes, grad = _biased(case, "reference")
    whole = _gradients(call, sizes, "reference", grad)
    monkeypatch.setattr(layer_pass, "sort_pairs", lambda *a: pairs.sort_pairs(*a)._replace(host_ends=None))
    for chunk in (2, 5):
        monkeypatch.setattr(weights, "CHUNK_ELEMENTS", chunk * 3 * case.hidden * case.inter)
        for found, expected in zip(_gradients(call, sizes, "reference", grad), whole, strict=True):
            assert relative_l2(found, expected) <= 1e-6


@pytest.mark.parametrize("waits", [True, False])
def test_products_by_torch(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's grouped_mm leaves rows that belong to nobody as they are: whatever they hold, nothing comes of it."""
    case = replace(LAYER, dtype=torch.bfloat16, bias=True, foreign=True)
    call, sizes, grad = _biased(case, "reference")
    whole = _gradients(call, sizes, "reference", grad)

    def grouped_mm(rows: Tensor, matrices: Tensor, offs: Tensor) -> Tensor:
        assert offs.dtype == torch.int32
        out = rows.new_full((rows.shape[0], matrices.shape[2]), float("nan"))
        start = 0
        for matrix, end in zip(matrices, offs.tolist(), strict=True):
            out[start:end] = rows[start:end] @ matrix
            start = end
        return out

    monkeypatch.setattr(products, "grouped_mm", grouped_mm)
    monkeypatch.setattr(products, "torch_serves", lambda *of: True)
    monkeypatch.setattr(layer_pass, "product_dtype", lambda call: torch.bfloat16)
    if not waits:
        monkeypatch.setattr(layer_pass, "sort_pairs", lambda *a: pairs.sort_pairs(*a)._replace(host_ends=None))
    for found, expected in zip(_gradients(call, sizes, "reference", grad), whole, strict=True):
        assert relative_l2(found, expected) <= 6e-3


def test_where_torch_serves() -> None:
    rows = SimpleNamespace(dtype=torch.float32, is_cuda=True)
    assert not products.torch_serves(rows, torch.empty(2, 64, 64), 64, 64)
    assert not products.torch_serves(torch.empty(2, 64, dtype=torch.bfloat16), torch.empty(2, 64, 64), 64, 64)


def test_a_backend_may_bring_its_own() -> None:
    call, sizes, grad = _biased(replace(LAYER, bias=True), "reference")
    mine = Gradients(grad, None, None, None)
    own = replace_backend(lambda *a: mine)
    assert experts_gradients(call, own, sizes, grad, ALL) is mine
    expected = _gradients(call, sizes, "reference", grad)
    found = experts_gradients(call, replace_backend(lambda *a: None), sizes, grad, ALL)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def replace_backend(run: Any) -> Any:
    return dataclasses.replace(BACKENDS["reference"], run_backward=run)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("on_input", [False, True])
def test_gradcheck(scheme: str, on_input: bool) -> None:
    """Weight-only layers in float64: finite differences of the oracle, of every argument that has a gradient."""
    case = Case(scheme=scheme, tokens=2, experts=2, top_k=1 if on_input else 2, hidden=32, inter=32, bias=True)
    call, sizes, _ = _biased(case, "reference")
    call = call._replace(act_format="none", activation="swigluoai", swiglu_alpha=1.7, swiglu_beta=1.0, swiglu_limit=0.9)
    call = call._replace(router_weight_on_input=on_input)
    if scheme == "none":
        call = call._replace(w13=call.w13.double(), w2=call.w2.double())

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *leaves: Tensor) -> Tensor:
            ctx.save_for_backward(*leaves)
            given = call._replace(**dict(zip(Wanted._fields, leaves, strict=True)))
            return experts_reference(given, emulate=False, dtype=torch.float64)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            given = call._replace(**dict(zip(Wanted._fields, ctx.saved_tensors, strict=True)))
            return tuple(experts_gradients(given, BACKENDS["reference"], sizes, grad, ALL))

    leaves = [getattr(call, name).double().requires_grad_() for name in Wanted._fields]
    assert torch.autograd.gradcheck(Layer.apply, leaves, fast_mode=True)
    assert all(t.dtype == torch.float64 for t in torch.autograd.grad(Layer.apply(*leaves).sum(), leaves))


def test_the_routing_of_a_piece() -> None:
    ids = torch.tensor([[3, 1], [1, -1], [9, 3], [1, 1]], dtype=torch.int32)
    found = pairs.sort_pairs(ids, 1, 4)  # local experts 1 .. 4
    assert found.order.tolist() == [1, 2, 6, 7, 0, 5, 3, 4]
    assert found.ends.tolist() == found.host_ends == [4, 4, 6, 6]
    (whole,) = pairs.pieces(found, 1, 4, 100)
    assert whole.places.tolist() == [4, 5]
    assert whole.expert.tolist() == [1, 1]
    assert whole.host_ends == whole.ends.tolist() == [0, 2, 2]
    first, second = pairs.pieces(found, 0, 4, 3)
    assert (first.host_ends, second.host_ends) == ([3, 3, 3, 3], [1, 1, 3, 3])
    (rolled,) = pairs.pieces(found._replace(host_ends=None), 1, 4, 3)
    assert rolled.places[: int(rolled.ends[-1])].tolist() == [4, 5]
    assert rolled.valid.tolist() == [True, True] + [False] * 6
    assert sorted(rolled.places.tolist()) == list(range(8))
