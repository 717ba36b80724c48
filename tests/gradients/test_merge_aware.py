"""Training that sees the merged and quantized weights: what was trained is what the merged checkpoint computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lora_cases import LAYERS, factors_of
from problems import Case, make_batch, make_raw
from straight_through import Leaves, layer
from tolerances import relative_l2
from torch import Tensor

import torch_moe_ops as moe

CASE = Case(tokens=29, experts=3, top_k=2, hidden=256, inter=128, dtype=torch.float32)
FACTORS = ("a13", "b13", "a2", "b2")


def _learning(lora: moe.Lora) -> moe.Lora:
    return replace(lora, **{name: getattr(lora, name).detach().clone().requires_grad_() for name in FACTORS})


def _merged(raw: moe.RawWeights, lora: moe.Lora) -> moe.RawWeights:
    return moe.merge_lora(raw, *(getattr(lora, name).detach() for name in FACTORS), scaling=lora.scaling)


@pytest.mark.parametrize("name", LAYERS)
def test_trained_is_merged_bit_for_bit(name: str) -> None:
    """A few steps; then the merged experts, quantized once from the first ones, give the same bits."""
    raw = LAYERS[name]()
    x, ids, topk = make_batch(CASE)
    w = moe.prepare(raw, act_format="none")
    lora, merge_aware = _learning(factors_of(raw, 1, 4, torch.float32)), moe.MergeAware(w)
    optimizer = torch.optim.SGD([getattr(lora, n) for n in FACTORS], lr=1e-3)
    target, losses = torch.randn_like(x), []
    for _ in range(3):
        assert merge_aware.update(lora)
        assert not merge_aware.update(lora)
        loss = (moe.fused_moe_routed(x, ids, topk, w, lora=lora, lora_merged=True) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    merge_aware.update(lora)
    trained = moe.fused_moe_routed(x, ids, topk, w, lora=lora, lora_merged=True)
    served = moe.prepare(_merged(raw, lora), act_format="none")
    assert torch.equal(trained, moe.fused_moe_routed(x, ids, topk, served))
    assert merge_aware.update()
    assert moe.restore(w).equal(raw)


@pytest.mark.parametrize("scheme", ["nvfp4", "int4", "fp8", "none"])
def test_gradients_are_straight_through(scheme: str) -> None:
    """Those of autograd, where the weights are W + scaling * B A whose rounding passes gradients through."""
    raw = make_raw(replace(CASE, scheme=scheme))
    x, ids, topk = make_batch(CASE)
    lora = _learning(factors_of(raw, 1, 4, torch.float32))
    w = moe.prepare(raw, act_format="none")
    moe.MergeAware(w).update(lora)
    leaf, weights = x.clone().requires_grad_(), topk.clone().requires_grad_()
    out = moe.fused_moe_routed(leaf, ids, weights, w, lora=lora, lora_merged=True)
    grad = torch.randn_like(out)
    out.backward(grad)

    merged = moe.dequantize_experts(_merged(raw, lora))
    own = _learning(lora)

    def through(values: Tensor, a: Tensor, b: Tensor) -> Tensor:
        product = lora.scaling * b @ a
        return values + (product - product.detach())

    leaves = Leaves(x.clone().requires_grad_(), topk.clone().requires_grad_(), None, None)
    matrices = through(merged[0], own.a13, own.b13), through(merged[1], own.a2, own.b2)
    expected = layer(leaves, ids, raw, *matrices, "none", rounds=torch.float32)
    expected.backward(grad)
    assert relative_l2(out, expected) <= 1e-5
    assert relative_l2(leaf.grad, leaves.x.grad) <= 1e-5
    assert relative_l2(weights.grad, leaves.weights.grad) <= 1e-5
    for name in FACTORS:
        assert relative_l2(getattr(lora, name).grad, getattr(own, name).grad) <= 1e-5, name


class _WritesToData(torch.optim.SGD):
    """As optimizers whose kernels get addresses: autograd's versions of the parameters do not change."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-group["lr"])


def test_steps_past_the_versions_are_seen() -> None:
    raw = make_raw(CASE)
    x, ids, topk = make_batch(CASE)
    w, lora = moe.prepare(raw, act_format="none"), _learning(factors_of(raw, 1, 4, torch.float32))
    merge_aware = moe.MergeAware(w)
    merge_aware.update(lora)
    optimizer = _WritesToData([getattr(lora, n) for n in FACTORS], lr=1.0)
    before = lora.b2._version
    moe.fused_moe_routed(x, ids, topk, w, lora=lora, lora_merged=True).square().sum().backward()
    optimizer.step()
    assert lora.b2._version == before
    assert merge_aware.update(lora)
    assert moe.restore(w).equal(_merged(raw, lora))
    assert not merge_aware.update(lora)


def test_merged_beside_the_layer() -> None:
    """The layer's own weights stay as they are: they run and are saved while a backward pass is yet to come."""
    raw = make_raw(CASE)
    x, ids, topk = make_batch(CASE)
    w, lora = moe.prepare(raw, act_format="none"), _learning(factors_of(raw, 1, 4, torch.float32))
    plain = moe.fused_moe_routed(x, ids, topk, w)
    merge_aware = moe.MergeAware.beside(w)
    assert merge_aware.update(lora)
    out = moe.fused_moe_routed(x.requires_grad_(), ids, topk, merge_aware.w, lora=lora, lora_merged=True)
    assert torch.equal(moe.fused_moe_routed(x, ids, topk, w), plain)
    assert moe.restore(w).equal(raw)
    assert moe.restore(merge_aware.w).equal(_merged(raw, lora))
    out.sum().backward()
    assert lora.b2.grad.any()
    assert not merge_aware.update(lora)
    assert merge_aware.update()
    assert moe.restore(merge_aware.w).equal(raw)


def test_what_is_loaded_into_the_base_is_merged() -> None:
    """In place, as load_state_dict does it, while the factors stay what they are."""
    raw = make_raw(CASE)
    other = _merged(raw, factors_of(raw, 1, 4, torch.float32, seed=9))
    w, lora = moe.prepare(raw, act_format="none"), factors_of(raw, 1, 4, torch.float32)
    merge_aware = moe.MergeAware.beside(w)
    assert not merge_aware.update()
    assert merge_aware.update(lora)
    w.update_(other)
    assert merge_aware.update(lora)
    assert moe.restore(merge_aware.w).equal(_merged(other, lora))
    assert not merge_aware.update(lora)


def test_several_adapters_are_not_merged() -> None:
    raw = make_raw(CASE)
    x, ids, topk = make_batch(CASE)
    w, lora = moe.prepare(raw, act_format="none"), factors_of(raw, 2, 4, torch.float32)
    with pytest.raises(ValueError, match="lora must be a single adapter, got 2"):
        moe.MergeAware(w).update(lora)
    lora_ids = torch.zeros(CASE.tokens, dtype=torch.int32)
    told = "lora_merged must be False but for one adapter of all tokens, got '2 adapters and lora_ids'"
    with pytest.raises(RuntimeError, match=told):
        moe.fused_moe_routed(x, ids, topk, w, lora=lora, lora_ids=lora_ids, lora_merged=True)
