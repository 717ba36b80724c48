"""Layers with shared experts: the same as the routed layer and the dense one beside it, in every form of call."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from problems import Case, make_raw
from tolerances import relative_l2
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.core.extension import has_cpu_extension
from torch_moe_ops.core.schemes import SCHEMES
from torch_moe_ops.prepared.state import prepared_of, state_of, take_over

F32 = torch.float32
ROUTED, TOP_K = 8, 3
ROUTING = moe.Routing("deepseek_v3", TOP_K, 4, 2, 2.5, torch.linspace(-0.2, 0.2, ROUTED))
BACKENDS = ("reference", "cpu") if has_cpu_extension() else ("reference",)
# What needs no scale of a row of the intermediate: a divided expert is then the whole one.
WEIGHT_ONLY = {name: "none" if "none" in scheme.act_formats else None for name, scheme in SCHEMES.items()}


def _raws(scheme: str = "nvfp4", parts: int = 2) -> tuple[moe.RawWeights, moe.RawWeights]:
    hidden, inter = (256, 128) if scheme in ("fp8_block", "int4") else (64, 32)
    routed = make_raw(Case(scheme=scheme, experts=ROUTED, hidden=hidden, inter=inter))
    return routed, make_raw(Case(scheme=scheme, experts=1, hidden=hidden, inter=parts * inter, seed=5))


def _layer(scheme: str = "nvfp4", parts: int = 2, **options: Any) -> moe.PreparedWeights:
    return moe.prepare(moe.with_shared_experts(*_raws(scheme, parts)), act_format=WEIGHT_ONLY[scheme], **options)


def _inputs(tokens: int, hidden: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=g).bfloat16()
    return x, torch.randn(tokens, ROUTED, generator=g), torch.rand(tokens, 1, generator=g)


def _beside(scheme: str, parts: int, backend: str, x: Tensor, logits: Tensor, gate: Tensor | None) -> Tensor:
    routed, dense = (moe.prepare(raw, act_format=WEIGHT_ONLY[scheme], backend=backend) for raw in _raws(scheme, parts))
    ids = torch.zeros(x.shape[0], 1, dtype=torch.int32)
    weights = torch.ones(x.shape[0], 1) if gate is None else gate
    return moe.fused_moe(x, logits, routed, routing=ROUTING, out_dtype=F32) + moe.fused_moe_routed(
        x, ids, weights, dense, out_dtype=F32
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_as_the_routed_layer_and_a_dense_one(scheme: str, parts: int, backend: str) -> None:
    w = _layer(scheme, parts, backend=backend)
    assert w.num_shared_experts == parts and w.num_experts == ROUTED + parts
    # int8 has no weight-only form on parts of a row: each has a scale of its own
    close = 1e-2 if WEIGHT_ONLY[scheme] is None and parts > 1 else 1e-6
    for tokens in (1, 5):
        x, logits, gate = _inputs(tokens, w.hidden_size)
        for given in (None, gate):
            y = moe.fused_moe(x, logits, w, routing=ROUTING, shared_expert_weights=given, out_dtype=F32)
            assert relative_l2(y, _beside(scheme, parts, backend, x, logits, given)) <= close
    none = moe.fused_moe(x[:0], logits[:0], w, routing=ROUTING)
    assert none.shape == (0, w.hidden_size) and none.dtype == torch.bfloat16


def test_batches_and_dtypes_of_gates() -> None:
    w = _layer()
    x, logits, gate = _inputs(6)
    want = moe.fused_moe(x, logits, w, routing=ROUTING, shared_expert_weights=gate.bfloat16())
    wide = gate.bfloat16().expand(6, 2)
    for given in (wide, wide.float()):
        assert torch.equal(moe.fused_moe(x, logits, w, routing=ROUTING, shared_expert_weights=given), want)
    batch = (t.view(2, 3, -1) for t in (x, logits, gate.bfloat16()))
    rows, scores, gates = batch
    y = moe.fused_moe(rows, scores, w, routing=ROUTING, shared_expert_weights=gates)
    assert torch.equal(y, want.view(2, 3, -1))


def test_columns_of_a_router_of_ones_own() -> None:
    w = _layer()
    x, logits, gate = _inputs(5)
    want = moe.route(logits, ROUTING, num_shared_experts=2, shared_expert_weights=gate)
    got = moe.append_shared_experts(*moe.route(logits, ROUTING), w, gate)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert got[0][:, TOP_K:].tolist() == [[8, 9]] * 5 and torch.equal(got[1][:, TOP_K:], gate.expand(5, 2))
    ids, weights = moe.append_shared_experts(want[0][:, :TOP_K].long(), want[1][:, :TOP_K].double(), w)
    assert ids.dtype == torch.int64 and weights.dtype == torch.float64 and weights[:, TOP_K:].eq(1).all()
    routed = moe.prepare(_raws()[0])
    assert moe.append_shared_experts(*want, routed) == want
    y = moe.fused_moe(x, logits, w, routing=ROUTING, shared_expert_weights=gate)
    assert torch.equal(moe.fused_moe_routed(x, *got, w), y)


def test_gradients_reach_the_tokens_the_router_and_the_gate() -> None:
    def leaves() -> tuple[Tensor, Tensor, Tensor]:
        x, logits, gate = _inputs(5)
        return x.float().requires_grad_(), logits.requires_grad_(), gate.requires_grad_()

    mine, theirs, grad = leaves(), leaves(), torch.randn(5, 64)
    y = moe.fused_moe(*mine[:2], _layer(backend="reference"), routing=ROUTING, shared_expert_weights=mine[2])
    y.backward(grad)
    _beside("nvfp4", 2, "reference", *theirs).backward(grad)
    for a, b in zip(mine, theirs, strict=True):
        assert relative_l2(a.grad, b.grad) <= 1e-5
    low = _inputs(5)[2].bfloat16().requires_grad_()
    moe.route(_inputs(5)[1], ROUTING, num_shared_experts=2, shared_expert_weights=low)[1].sum().backward()
    assert torch.equal(low.grad, torch.full_like(low, 2.0))


def test_with_adapters_on_all_experts() -> None:
    w, (x, logits, gate) = _layer(backend="reference"), _inputs(5)
    count = w.num_local_experts
    lora = moe.Lora(a2=torch.randn(count, 2, 32), b2=torch.randn(count, 64, 2))
    y = moe.fused_moe(x, logits, w, routing=ROUTING, shared_expert_weights=gate, lora=lora)
    ids, weights = moe.route(logits, ROUTING, num_shared_experts=2, shared_expert_weights=gate)
    assert torch.equal(y, moe.fused_moe_routed(x, ids, weights, w, lora=lora))
    assert relative_l2(y, moe.fused_moe(x, logits, w, routing=ROUTING, shared_expert_weights=gate)) > 0.1


@pytest.mark.parametrize("dynamic", [False, True])
def test_in_one_compiled_graph(dynamic: bool) -> None:
    w = _layer()

    def model(x: Tensor, logits: Tensor, gate: Tensor) -> Tensor:
        weights = torch.sigmoid(gate)
        return moe.fused_moe(x, logits, w, routing=ROUTING, shared_expert_weights=weights, out_dtype=F32) * 2

    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (5, 7):
        assert torch.equal(compiled(*_inputs(tokens)), model(*_inputs(tokens)))


def test_exported() -> None:
    w = _layer()

    class Model(torch.nn.Module):
        def forward(self, x: Tensor, logits: Tensor, gate: Tensor) -> Tensor:
            return moe.fused_moe(x, logits, w, routing=ROUTING, shared_expert_weights=gate)

    rows = torch.export.Dim("rows", min=2, max=64)
    exported = torch.export.export(Model(), _inputs(5), dynamic_shapes=[{0: rows}] * 3)
    assert torch.equal(exported.module()(*_inputs(9)), Model()(*_inputs(9)))


def test_kept_by_every_way_out_and_back(tmp_path: Path) -> None:
    raw = moe.with_shared_experts(*_raws())
    w = moe.prepare(raw)
    assert moe.restore(w).equal(raw)
    w.save(tmp_path / "w.safetensors")
    assert moe.PreparedWeights.load(tmp_path / "w.safetensors").num_shared_experts == 2
    assert prepared_of("here", state_of(w)).num_shared_experts == 2
    assert w.to("cpu").num_shared_experts == 2
    assert "num_shared_experts=2" in str(moe.explain(w)) and w.problem.num_shared_experts == 2
    assert "num_shared" not in str(moe.explain(moe.prepare(_raws()[0])))


def test_files_of_before_there_were_any(tmp_path: Path) -> None:
    w = moe.prepare(_raws()[0])
    told = {name: value for name, value in w.metadata().items() if name != "num_shared_experts"}
    from torch_moe_ops.files import serialization

    serialization.write(tmp_path / "w.safetensors", w.tensors(), told, 1)
    assert moe.PreparedWeights.load(tmp_path / "w.safetensors").num_shared_experts == 0
    serialization.write(tmp_path / "w.safetensors", w.tensors(), {**told, "num_shared_experts": ROUTED}, 1)
    with pytest.raises(ValueError, match=r"num_shared_experts must be in 0..7, got 8"):
        moe.PreparedWeights.load(tmp_path / "w.safetensors")


def test_not_exchanged_for_as_many_routed_ones() -> None:
    raw = moe.with_shared_experts(*_raws())
    plain = dataclasses.replace(raw, num_shared_experts=0)
    w, other = moe.prepare(raw), moe.prepare(plain)
    with pytest.raises(ValueError, match="update_: num_shared_experts must be 2 as prepared, got 0"):
        w.update_(plain)
    with pytest.raises(ValueError, match="num_shared_experts must be 2 as prepared, got 0"):
        take_over(w, other)
    w.update_(raw)


def test_never_silently_without_or_beside_them() -> None:
    w, routed = _layer(), moe.prepare(_raws()[0])
    x, _, gate = _inputs(5)
    for columns in (7, 9, 10):
        with pytest.raises(RuntimeError, match=r"router_logits must have 8 columns, .* \(w has 2 shared ones"):
            moe.fused_moe(x, torch.randn(5, columns), w, routing=moe.Routing("renormalize", 2))
    logits = torch.randn(5, ROUTED)
    with pytest.raises(RuntimeError, match="shared_expert_weights must be None unless num_shared_experts"):
        moe.fused_moe(x, logits, routed, routing=ROUTING, shared_expert_weights=gate)
    share = moe.prepare(moe.with_shared_experts(*_raws()), num_experts=20, local_expert_offset=10)
    with pytest.raises(ValueError, match=r"must have all experts .*ExpertParallel.*got 10 of 20"):
        moe.fused_moe(x, logits, share, routing=ROUTING)
    with pytest.raises(RuntimeError, match="num_shared_experts must be 0 for 'llama4'"):
        moe.fused_moe(x, logits, w, routing=moe.Routing("llama4", 1))
    with pytest.raises(ValueError, match="router_weight_on_input must be False where there are shared experts"):
        _layer(router_weight_on_input=True)


@pytest.mark.parametrize("num_experts", [0, ROUTED, ROUTED + 2])
def test_the_monolithic_op_refuses_such_weights(num_experts: int) -> None:
    """Its router would take the shared experts for routed ones, or leave them out."""
    w, (x, logits, _) = _layer(), _inputs(5)
    head = (x, None, logits, None, *w.op_weights(), w.backend, "renormalize", 2, w.act_format)
    with pytest.raises(RuntimeError, match="num_experts must be"):
        torch.ops.moeq.nvfp4_moe(*head, num_experts=num_experts)


@pytest.mark.parametrize("shape", [(5,), (1, 2), (1, 1), (), (5, 3)], ids=str)
def test_gates_that_would_be_broadcast_are_refused(shape: tuple[int, ...]) -> None:
    w, ids, weights = _layer(), torch.zeros(5, TOP_K, dtype=torch.int32), torch.ones(5, TOP_K)
    with pytest.raises(ValueError, match=r"shared_expert_weights must have shape \[5, 1\] or \[5, 2\], got"):
        moe.append_shared_experts(ids, weights, w, torch.rand(shape))
    with pytest.raises(ValueError, match="must be None where w has no shared experts"):
        moe.append_shared_experts(ids, weights, moe.prepare(_raws()[0]), torch.rand(5, 1))


@pytest.mark.parametrize("columns", [ROUTED - 1, ROUTED + 2])
def test_beside_adapters_logits_are_of_the_experts(columns: int) -> None:
    w, (x, _, _) = moe.prepare(_raws()[0], backend="reference"), _inputs(3)
    lora = moe.Lora(a2=torch.zeros(ROUTED, 2, 32), b2=torch.zeros(ROUTED, 64, 2))
    with pytest.raises(
        RuntimeError, match=f"router_logits must have {ROUTED} columns, one for each routed expert, got"
    ):
        moe.fused_moe(x, torch.zeros(3, columns), w, routing=moe.Routing("renormalize", 2), lora=lora)
