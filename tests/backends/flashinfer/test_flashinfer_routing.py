"""Monolithic calls: which routing the kernels do, that it is ours, and who does the rest."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from problems import Case, make_batch, make_raw

import torch_moe_ops as moe
from torch_moe_ops.backends.flashinfer import routing, trtllm_call
from torch_moe_ops.core.routing_methods import ROUTING_METHODS

pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
from flashinfer_sim import seam, trtllm
from flashinfer_trtllm_cases import NAME, NVFP4, distinct_logits
from tolerances import relative_l2

CASE = dataclasses.replace(NVFP4, tokens=9, experts=16, top_k=4)
GROUPED = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of every call that reaches the simulator, by C++ name."""
    found: list[dict[str, Any]] = []
    seam.allow_cpu(monkeypatch, NAME)
    seam.install(monkeypatch)
    real = trtllm._OPS["trtllm_fp4_block_scale_moe"]

    def noted(a: dict[str, Any]) -> torch.Tensor:
        found.append(a)
        return real(a)

    monkeypatch.setitem(trtllm._OPS, "trtllm_fp4_block_scale_moe", noted)
    return found


def both(case: Case) -> tuple[moe.PreparedWeights, moe.PreparedWeights]:
    raw = make_raw(case)
    return tuple(moe.prepare(raw, act_format="nvfp4", backend=b) for b in (NAME, "reference"))


def routings() -> dict[str, moe.Routing]:
    bias = torch.linspace(-0.3, 0.3, 16)[torch.randperm(16, generator=torch.Generator().manual_seed(1))]
    found = {name: moe.Routing(name, 1 if name == "llama4" else 4) for name in ROUTING_METHODS if _plain(name)}
    return found | {
        "deepseek_v3 grouped": moe.Routing("deepseek_v3", 4, bias=bias, **GROUPED),
        "deepseek_v3 negative bias": moe.Routing("deepseek_v3", 4, bias=bias - 5, **GROUPED),
        "deepseek_v3 biased": moe.Routing("deepseek_v3", 4, bias=bias, routed_scaling_factor=2.5),
        "minimax2 biased": moe.Routing("minimax2", 4, bias=bias),
        "minimax2 scaled": moe.Routing("minimax2", 4, bias=bias, routed_scaling_factor=2.0),
        "default grouped": moe.Routing("default", 4, n_group=4, topk_group=2),
        "default renormalized": moe.Routing("default", 4, renormalize=True),
        "grouped without bias": moe.Routing("deepseek_v3", 4, n_group=4, topk_group=2),
    }


def _plain(name: str) -> bool:
    return name not in ("custom", "simulated", "unspecified")


BY_US = {"llama4", "deepseek_v4", "minimax2 scaled", "default grouped", "default renormalized", "grouped without bias"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", list(routings()))
def test_every_method(name: str, dtype: torch.dtype, bound: list[dict[str, Any]]) -> None:
    w, oracle = both(CASE)
    x, wanted = make_batch(CASE)[0], routings()[name]
    logits = distinct_logits(CASE.tokens, CASE.experts).to(dtype)
    got, expected = (moe.fused_moe(x, logits, layer, routing=wanted) for layer in (w, oracle))
    assert relative_l2(got, expected) < 5e-3
    absent = wanted.method in routing.METHODS and not routing.package.has_member(
        "RoutingMethodType", routing.METHODS[wanted.method]
    )
    assert (bound[-1]["routing_logits"] is None) == (name in BY_US or absent)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"method": "llama4"}, "routing_method must be one of"),
        ({"renormalize": False}, "renormalize must be True for deepseek_v3, got False"),
        ({"method": "renormalize", "scaling_factor": 2.0}, "routed_scaling_factor must be 1 for renormalize, got 2.0"),
        ({"n_group": 1, "top_k": 9}, "deepseek_v3 must have at most 1024 experts and top_k 8, got 256 and 9"),
        (
            {"method": "topk", "n_group": 1, "top_k": 9, "scaling_factor": 1.0},
            "topk must have at most 256 experts and top_k 8, got 256 and 9",
        ),
        ({"bias": None}, "n_group must be at most 1 unless deepseek_v3 has a bias, got 8"),
        ({"n_group": 16}, "n_group=16"),
        ({"topk_group": 5}, "topk_group=5"),
        ({"top_k": 9}, "top_k=9"),
    ],
)
def test_limits_of_the_routing_kernels(change: dict[str, Any], text: str) -> None:
    logits = torch.zeros(1, 256)
    deepseek = routing.Routing(logits, torch.zeros(256), "deepseek_v3", 8, 8, 4, 2.5, None)
    assert routing.kernel_unmet("fp8_block", deepseek) is None
    reason = routing.kernel_unmet("fp8_block", deepseek._replace(**change))
    assert reason is not None and text in reason


def test_fp8_block_passes_groups_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = routing.Routing(torch.zeros(1, 64), torch.zeros(64), "deepseek_v3", 8, 0, 0, 1.0, None)
    assert routing.logits_arguments("fp8_block", wanted)["n_group"] == 1
    assert routing.logits_arguments("nvfp4", wanted)["n_group"] is None
    assert routing.kernel_unmet("fp8_block", wanted._replace(top_k=9)) is not None


def test_expert_parallel_ranks_sum_to_the_whole(bound: list[dict[str, Any]]) -> None:
    raw, x = make_raw(CASE), make_batch(CASE)[0]
    logits, wanted = distinct_logits(9, 16), moe.Routing("renormalize", 4)
    whole = moe.fused_moe(x, logits, moe.prepare(raw, act_format="nvfp4", backend="reference"), routing=wanted)
    total = torch.zeros(whole.shape)
    for start, stop in ((0, 5), (5, 16)):  # uneven ranges
        mine = {n: t[start:stop] for n, t in raw.tensors().items() if t.ndim}
        part = dataclasses.replace(raw, **mine)
        w = moe.prepare(part, act_format="nvfp4", backend=NAME, num_experts=16, local_expert_offset=start)
        total += moe.fused_moe(x, logits, w, routing=wanted).float()
        assert bound[-1]["local_expert_offset"] == start and bound[-1]["local_num_experts"] == stop - start
    assert relative_l2(total, whole) < 5e-3


def test_one_input_scale_for_all_experts(bound: list[dict[str, Any]]) -> None:
    """Scales of experts are merged into the largest; ranks that hold a part must be given one."""
    raw = make_raw(dataclasses.replace(CASE, input_scale="expert"))
    merged = dataclasses.replace(raw, a13_input_scale=raw.a13_input_scale.max())
    w = moe.prepare(raw, act_format="nvfp4", backend=NAME)
    x, ids, weights = make_batch(CASE)
    oracle = moe.prepare(merged, act_format="nvfp4", backend="reference")
    got, expected = (moe.fused_moe_routed(x, ids, weights, layer) for layer in (w, oracle))
    assert relative_l2(got, expected) < 5e-3
    assert moe.restore(w).equal(raw)
    assert "takes the largest input scale for all experts" in moe.explain(w).notes[NAME]
    with pytest.raises(ValueError, match=r"input_scale must be 'tensor' \(the largest of all ranks\) where 16 of 32"):
        moe.prepare(raw, act_format="nvfp4", backend=NAME, num_experts=32)


def test_long_batches_are_split(bound: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trtllm_call, "MAX_EXPANDED_TOKENS", 17)  # 4 tokens of top_k 4
    w, oracle = both(CASE)
    x, ids, weights = make_batch(CASE)
    got, expected = (moe.fused_moe_routed(x, ids, weights, layer) for layer in (w, oracle))
    assert relative_l2(got, expected) < 5e-3
    assert [a["hidden_states"].shape[0] for a in bound] == [4, 4, 1]
    moe.fused_moe(x, distinct_logits(9, 16), w, routing=moe.Routing("renormalize", 4))
    assert [a["routing_logits"].shape[0] for a in bound[3:]] == [4, 4, 1]


def test_router_weight_on_input(bound: list[dict[str, Any]]) -> None:
    case = dataclasses.replace(CASE, top_k=1)
    raw, (x, ids, weights) = make_raw(case), make_batch(case)
    layers = [moe.prepare(raw, act_format="nvfp4", backend=b, router_weight_on_input=True) for b in (NAME, "reference")]
    got, expected = (moe.fused_moe_routed(x, ids, weights * 3, layer) for layer in layers)
    assert relative_l2(got, expected) < 5e-3


def test_hidden_states_packed_beforehand_and_other_outputs(bound: list[dict[str, Any]]) -> None:
    w, _ = both(dataclasses.replace(CASE, hidden=144))
    x, ids, weights = make_batch(dataclasses.replace(CASE, hidden=144))
    codes, scale = moe.quantize_nvfp4(x, w.a1_gscale)
    plain = moe.fused_moe_routed(x, ids, weights, w)
    assert torch.equal(moe.fused_moe_routed(codes, ids, weights, w, hidden_states_scale=scale), plain)
    wide = moe.fused_moe_routed(x, ids, weights, w, out_dtype=torch.float32)
    assert wide.dtype == torch.float32 and torch.equal(wide.bfloat16(), plain)
    out = torch.empty_like(plain)
    assert moe.fused_moe_routed(x, ids, weights, w, out=out) is out and torch.equal(out, plain)
