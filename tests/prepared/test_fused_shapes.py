"""fused_moe and fused_moe_routed on hidden states of [batch, sequence, hidden_size]: the same numbers as on rows."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch._dynamo.testing
from problems import Case, make_raw
from torch import Tensor

import torch_moe_ops as moe

ROUTING = moe.Routing("renormalize", top_k=2)
SHAPES = ((2, 3), (1, 1), (0, 3), (2, 0), (2, 1, 3))


@pytest.fixture(scope="module", params=[("none", "none"), ("nvfp4", "none"), ("nvfp4", "nvfp4")], ids="-".join)
def layer(request: pytest.FixtureRequest) -> moe.PreparedWeights:
    scheme, act_format = request.param
    return moe.prepare(make_raw(Case(scheme=scheme, experts=4, hidden=64, inter=48)), act_format=act_format)


def _inputs(layer: moe.PreparedWeights, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(len(shape))
    x = torch.randn(*shape, layer.hidden_size, generator=generator, dtype=torch.bfloat16)
    return x, torch.randn(*shape, layer.num_experts, generator=generator)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_in_more_dimensions(layer: moe.PreparedWeights, shape: tuple[int, ...]) -> None:
    x, logits = _inputs(layer, shape)
    rows, row_logits = x.flatten(0, -2), logits.flatten(0, -2)
    got, want = (
        moe.fused_moe(x, logits, layer, routing=ROUTING),
        moe.fused_moe(rows, row_logits, layer, routing=ROUTING),
    )
    assert got.shape == x.shape and torch.equal(got.flatten(0, -2), want)
    # The router's logits as rows, as many routers give them.
    assert torch.equal(moe.fused_moe(x, row_logits, layer, routing=ROUTING), got)

    ids, weights = moe.route(row_logits, ROUTING)
    wide = ids.to(torch.int64).view(*shape, 2)
    got = moe.fused_moe_routed(x, wide, weights.view(*shape, 2), layer)
    assert got.shape == x.shape and torch.equal(got.flatten(0, -2), want)
    out = torch.full_like(x, float("nan"))
    assert moe.fused_moe_routed(x, ids, weights, layer, out=out) is out and torch.equal(out, got)


def test_packed_hidden_states_in_more_dimensions() -> None:
    raw = make_raw(Case(scheme="nvfp4", experts=4, hidden=64, inter=48, input_scale="tensor"))
    layer = moe.prepare(raw, act_format="nvfp4")
    x, logits = _inputs(layer, (2, 3))
    codes, scale = moe.quantize_nvfp4(x.flatten(0, 1), layer.a1_gscale)
    want = moe.fused_moe(codes, logits.flatten(0, 1), layer, routing=ROUTING, hidden_states_scale=scale)
    packed = {"hidden_states_scale": scale.unflatten(0, (2, 3))}
    got = moe.fused_moe(codes.unflatten(0, (2, 3)), logits, layer, routing=ROUTING, **packed)
    assert got.shape == (2, 3, 64) and torch.equal(got.flatten(0, 1), want)


def test_one_graph_for_any_batch_and_sequence(layer: moe.PreparedWeights) -> None:
    torch._dynamo.reset()
    count = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(
        lambda x, logits: moe.fused_moe(x, logits, layer, routing=ROUTING), backend=count, fullgraph=True, dynamic=True
    )
    for shape in ((5, 7), (7, 11), (9, 13)):  # sizes that no weight has: equal ones share a symbol
        x, logits = _inputs(layer, shape)
        assert torch.equal(compiled(x, logits), moe.fused_moe(x, logits, layer, routing=ROUTING))
    assert count.frame_count == 1


def test_what_does_not_fit_is_refused_by_the_op(layer: moe.PreparedWeights) -> None:
    x, logits = _inputs(layer, (2, 3))
    with pytest.raises(RuntimeError, match=r"router_logits must have num_tokens = 6 rows"):
        moe.fused_moe(x, logits[0], layer, routing=ROUTING)
    with pytest.raises(RuntimeError, match=r"topk_ids must have num_tokens = 6|topk_ids must have shape \(6"):
        moe.fused_moe_routed(x, torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, 2), layer)


def test_as_many_tokens_in_other_dimensions_are_refused(layer: moe.PreparedWeights) -> None:
    """[sequence, batch] beside [batch, sequence]: each token would meet the experts of another one."""
    x, logits = _inputs(layer, (2, 3))
    ids, weights = (t.view(2, 3, 2) for t in moe.route(logits.flatten(0, 1), ROUTING))
    other = r"must have shape \(2, 3, {}\) like hidden_states, got \(3, 2, {}\)"
    with pytest.raises(RuntimeError, match="fused_moe: router_logits " + other.format(4, 4)):
        moe.fused_moe(x, logits.view(3, 2, 4), layer, routing=ROUTING)
    wrong = {"topk_ids": (ids.view(3, 2, 2), weights), "topk_weights": (ids, weights.view(3, 2, 2))}
    host = moe.HostExperts(moe.restore(layer), 1, act_format=layer.act_format)
    factors = (torch.ones(4, 1, layer.hidden_size), torch.ones(4, 2 * layer.intermediate_size, 1))
    lora = moe.Lora(*factors)
    for name, given in wrong.items():
        match = f"{name} " + other.format(2, 2)
        for options in ({}, {"lora": lora}, {"out": torch.empty_like(x)}):
            with pytest.raises(RuntimeError, match=f"fused_moe_routed: {match}"):
                moe.fused_moe_routed(x, *given, layer, **options)
        with pytest.raises(RuntimeError, match=f"HostExperts: {match}"):
            host(x, *given)
    owners = torch.zeros(3, 2, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="lora_ids " + other.format(1, 1)):
        moe.fused_moe_routed(x, ids, weights, layer, lora=lora, lora_ids=owners)
    with pytest.raises(RuntimeError, match="fused_moe: lora_ids"):
        moe.fused_moe(x, logits, layer, routing=ROUTING, lora=lora, lora_ids=owners)
    moe.fused_moe(x, logits, layer, routing=ROUTING, lora=lora, lora_ids=owners.flatten())


def test_weights_of_shared_experts_are_of_the_same_tokens() -> None:
    case = Case(scheme="none", experts=4, hidden=64, inter=48)
    shared = make_raw(dataclasses.replace(case, experts=1, seed=1))
    layer = moe.prepare(moe.with_shared_experts(make_raw(case), shared))
    x, logits = torch.randn(2, 3, 64).bfloat16(), torch.randn(2, 3, 4)
    gates = torch.rand(2, 3, 1)
    with pytest.raises(RuntimeError, match=r"shared_expert_weights must have shape \(2, 3, 1\) like hidden_states"):
        moe.fused_moe(x, logits, layer, routing=ROUTING, shared_expert_weights=gates.view(3, 2, 1))
    with pytest.raises(RuntimeError, match=r"router_logits must have shape \(2, 3, 4\) like hidden_states"):
        moe.fused_moe(x, logits.view(3, 2, 4), layer, routing=ROUTING, shared_expert_weights=gates.view(3, 2, 1))
    moe.fused_moe(x, logits, layer, routing=ROUTING, shared_expert_weights=gates)


def test_gates_beside_logits_that_are_rows() -> None:
    case = Case(scheme="none", experts=4, hidden=64, inter=48)
    raw = moe.with_shared_experts(make_raw(case), make_raw(dataclasses.replace(case, experts=1, seed=1)))
    x, logits, gates = torch.randn(2, 3, 64).bfloat16(), torch.randn(6, 4), torch.rand(3, 2, 1)
    other = r"shared_expert_weights must have shape \(2, 3, 1\) like hidden_states, got \(3, 2, 1\)"
    with pytest.raises(RuntimeError, match=other):
        moe.fused_moe(x, logits, moe.prepare(raw), routing=ROUTING, shared_expert_weights=gates)
    with pytest.raises(RuntimeError, match="HostExperts: " + other):
        moe.HostExperts(raw, 1).fused(x, logits, routing=ROUTING, shared_expert_weights=gates)


def test_dimensions_of_one_token_do_not_count(layer: moe.PreparedWeights) -> None:
    x, logits = _inputs(layer, (2, 1, 3))
    expected = moe.fused_moe(x.flatten(0, 2), logits.flatten(0, 2), layer, routing=ROUTING)
    assert torch.equal(moe.fused_moe(x, logits.squeeze(1), layer, routing=ROUTING).flatten(0, 2), expected)


def test_a_compiler_is_told_the_argument_too(layer: moe.PreparedWeights) -> None:
    x, logits = _inputs(layer, (5, 7))
    compiled = torch.compile(
        lambda x, logits: moe.fused_moe(x, logits, layer, routing=ROUTING),
        backend="eager",
        fullgraph=True,
        dynamic=True,
    )
    with pytest.raises(Exception, match="router_logits must have shape"):
        compiled(x, logits.transpose(0, 1))
