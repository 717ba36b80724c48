"""`flashinfer_cutlass` against the oracle: FlashInfer's own front on a CPU, a simulator of the module behind it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from problems import make_batch, make_raw

import torch_moe_ops as moe
from torch_moe_ops.backends.flashinfer import package

pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
from flashinfer_cutlass_cases import BASE, BLACKWELL, CASES, NAME, NVFP4, raw_of, use
from tolerances import relative_l2


@pytest.mark.parametrize("name", CASES)
def test_routed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    capability, case = CASES[name]
    calls = use(monkeypatch, capability)
    raw = raw_of(case)
    why = "; ".join(moe.explain(raw, act_format=case.act_format).against[NAME])
    if "flashinfer must have" in why or "which flashinfer" in why:
        pytest.skip(why)
    w, oracle = (moe.prepare(raw, act_format=case.act_format, backend=b) for b in (NAME, "reference"))
    x, ids, weights = make_batch(case)
    got, expected = moe.fused_moe_routed(x, ids, weights, w), moe.fused_moe_routed(x, ids, weights, oracle)
    assert len(calls) == 1
    assert relative_l2(got, expected) < 5e-3
    assert moe.restore(w).equal(raw)
    logits, routing = torch.randn(case.tokens, case.experts), moe.Routing("deepseek_v3", case.top_k)
    got, expected = (moe.fused_moe(x, logits, layer, routing=routing) for layer in (w, oracle))
    assert relative_l2(got, expected) < 5e-3


def test_expert_parallel_ranks_sum_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = use(monkeypatch, BLACKWELL)
    raw, (x, ids, weights) = make_raw(NVFP4), make_batch(NVFP4)
    whole = moe.fused_moe_routed(x, ids, weights, moe.prepare(raw, act_format="nvfp4", backend="reference"))
    total = torch.zeros(whole.shape)
    for rank in (0, 1):
        mine = {n: t[4 * rank : 4 * rank + 4] for n, t in raw.tensors().items() if t.ndim}
        part = dataclasses.replace(raw, **mine)
        w = moe.prepare(part, act_format="nvfp4", backend=NAME, num_experts=8, local_expert_offset=4 * rank)
        total += moe.fused_moe_routed(x, ids, weights, w).float()
        assert (calls[-1]["ep_size"], calls[-1]["ep_rank"]) == (2, rank)
    assert relative_l2(total, whole) < 5e-3


def test_uneven_ranges_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, BLACKWELL)
    with pytest.raises(ValueError, match="must be multiples of the 8 local experts, got 4, 12"):
        moe.prepare(make_raw(NVFP4), act_format="nvfp4", backend=NAME, num_experts=12, local_expert_offset=4)


def test_deterministic_finalize(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = use(monkeypatch, BLACKWELL)
    if "use_fused_finalize" not in package.entry("cutlass_fused_moe").parameters:
        pytest.skip("this release has atomics only")
    w = moe.prepare(make_raw(NVFP4), act_format="nvfp4", backend=NAME)
    moe.fused_moe_routed(*make_batch(NVFP4), w)
    assert [a["fused_finalize"] for a in calls] == [False]


def test_hidden_states_packed_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, BLACKWELL)
    case = dataclasses.replace(NVFP4, hidden=144)
    w = moe.prepare(make_raw(case), act_format="nvfp4", backend=NAME)
    x, ids, weights = make_batch(case)
    codes, scale = moe.quantize_nvfp4(x, w.a1_gscale)
    packed = moe.fused_moe_routed(codes, ids, weights, w, hidden_states_scale=scale)
    assert torch.equal(packed, moe.fused_moe_routed(x, ids, weights, w))


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, BLACKWELL)
    half = make_raw(dataclasses.replace(NVFP4, per_half=True))
    with pytest.raises(ValueError, match="per_half_alphas must be False"):
        moe.prepare(half, act_format="nvfp4", backend=NAME)
    block = make_raw(dataclasses.replace(BASE, scheme="fp8_block"))
    with pytest.raises(ValueError, match=r"compute capability must be one of 9\.0 for fp8_block weights, got 10\.0"):
        moe.prepare(block, act_format="fp8", backend=NAME)
    w = moe.prepare(make_raw(NVFP4), act_format="nvfp4", backend=NAME)
    several = dataclasses.replace(w, a1_gscale=torch.ones(8))
    with pytest.raises(RuntimeError, match=r"a1_gscale must have shape \(\): one calibrated scale"):
        moe.fused_moe_routed(*make_batch(NVFP4), several)
