"""Which calls reach a routing kernel of FlashInfer: exactly those that it is compiled for, with a bias where it reads one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from problems import make_batch, make_raw

import torch_moe_ops as moe
from torch_moe_ops.backends.flashinfer import package, routing

pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
from flashinfer_problems import NVFP4 as PROBLEM
from flashinfer_problems import TRTLLM
from flashinfer_sim import seam, tiers
from flashinfer_trtllm_cases import BASE, NVFP4, distinct_logits
from tolerances import relative_l2

EXPERTS = (4, 8, 60, 62, 128, 130, 160, 256, 257, 260, 384, 512, 514, 576, 768, 896, 900, 1024, 1028, 1536, 2048)
TOP_K = (1, 2, 4, 6, 8, 9, 16, 17, 22, 23, 32)
SCHEMES = ("nvfp4", "fp8_block", "mxfp8", "none")


def known(method: str) -> bool:
    return package.has_member("RoutingMethodType", routing.METHODS[method])


def arguments(scheme: str, wanted: routing.Routing) -> dict[str, Any]:
    """What a monolithic function would be told, as far as routing goes."""
    return {**routing.logits_arguments(scheme, wanted), "num_experts": wanted.router_logits.shape[1]}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("method", routing.METHODS)
def test_no_call_reaches_a_kernel_that_throws(method: str, scheme: str) -> None:
    if not known(method):
        pytest.skip(f"this release has no {method}")
    reached = 0
    for experts in EXPERTS:
        logits = torch.zeros(1, experts)
        for top_k in (k for k in TOP_K if k < experts):
            wanted = routing.Routing(logits, None, method, top_k, 0, 0, 1.0, None)
            if routing.kernel_unmet(scheme, wanted) is None:
                reached += 1
                tiers.check_logits(routing.METHODS[method], arguments(scheme, wanted))
            elif experts % 4 == 0 and scheme in ("nvfp4", "none"):
                assert not tiers.covered(routing.METHODS[method], experts, top_k), f"{experts}, {top_k}: sent elsewhere"
            tiers.check_given({"num_experts": experts, "top_k": top_k})
    assert reached


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_grouped_call_reaches_a_kernel_that_throws(scheme: str) -> None:
    reached = 0
    for experts in EXPERTS:
        logits, bias = torch.zeros(1, experts), torch.zeros(experts)
        groupings = [(n, kept) for n in (2, 4, 8, 16) if experts % n == 0 for kept in (1, 2, 4, 5, 8) if kept <= n]
        for n_group, topk_group in groupings:
            for top_k in (k for k in TOP_K if k <= topk_group * experts // n_group):
                wanted = routing.Routing(logits, bias, "deepseek_v3", top_k, n_group, topk_group, 2.5, None)
                if routing.kernel_unmet(scheme, wanted) is None:
                    reached += 1
                    tiers.check_logits("DeepSeekV3", arguments(scheme, wanted))
    assert reached


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seam.allow_cpu(monkeypatch, TRTLLM)
    return seam.install(monkeypatch)


LARGE = {
    "default": (300, 4),
    "topk": (64, 9),
    "sigmoid_renorm": (260, 2),
    "deepseek_v3": (1028, 2),
    "minimax2": (64, 4),
    "renormalize": (520, 9),
}


@pytest.mark.parametrize("method", LARGE)
def test_what_no_kernel_routes_is_routed_by_us(method: str, calls: list[str]) -> None:
    """Through the op: the results are the oracle's, whoever routes, with and without a bias."""
    experts, top_k = LARGE[method]
    case = dataclasses.replace(BASE, scheme="none", experts=experts, top_k=top_k, hidden=64, inter=64, tokens=3)
    raw, x = make_raw(case), make_batch(case)[0]
    w, oracle = (moe.prepare(raw, backend=b) for b in (TRTLLM, "reference"))
    logits, wanted = distinct_logits(3, experts), moe.Routing(method, top_k)
    got, expected = (moe.fused_moe(x, logits, layer, routing=wanted) for layer in (w, oracle))
    assert calls and relative_l2(got, expected) < 5e-3


def test_more_choices_than_the_kernels_sort_are_refused(calls: list[str]) -> None:
    case = dataclasses.replace(BASE, scheme="none", experts=40, top_k=33, hidden=64, inter=64, tokens=3)
    w = moe.prepare(make_raw(case), backend=TRTLLM)
    with pytest.raises(RuntimeError, match="topk_ids must have at most 32 columns for flashinfer_trtllm, got 33"):
        moe.fused_moe_routed(*make_batch(case), w)
    assert not calls


@pytest.mark.parametrize("scheme", ["nvfp4", "fp8_block"])
@pytest.mark.parametrize("method", ["deepseek_v3", "minimax2"])
def test_kernels_that_read_a_bias_get_one(method: str, scheme: str) -> None:
    wanted = routing.Routing(torch.zeros(2, 64), None, method, 4, 0, 0, 1.0, None)
    assert routing.kernel_unmet(scheme, wanted) is None
    bias = routing.logits_arguments(scheme, wanted)["routing_bias"]
    assert torch.equal(bias, torch.zeros(64)) and bias.dtype == torch.float32
    given = torch.linspace(-1, 1, 64)
    assert routing.logits_arguments(scheme, wanted._replace(bias=given))["routing_bias"] is given
    plain = routing.logits_arguments(scheme, wanted._replace(method="renormalize"))
    assert plain["routing_bias"] is None


@pytest.mark.parametrize("method", ["deepseek_v3", "minimax2"])
def test_no_bias_is_a_bias_of_zero(method: str, calls: list[str]) -> None:
    case = dataclasses.replace(NVFP4, tokens=9, experts=16, top_k=4)
    raw, x = make_raw(case), make_batch(case)[0]
    w, oracle = (moe.prepare(raw, act_format="nvfp4", backend=b) for b in (TRTLLM, "reference"))
    logits, wanted = distinct_logits(9, 16), moe.Routing(method, 4)
    got, expected = (moe.fused_moe(x, logits, layer, routing=wanted) for layer in (w, oracle))
    assert relative_l2(got, expected) < 5e-3


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"routing_method": "llama4"}, "moeq::route does llama4 routing"),
        ({"routing_method": "sigmoid", "num_experts": 512}, "moeq::route does sigmoid routing of 512 experts"),
        ({"routing_method": "default", "top_k": 9}, "moeq::route does default routing of 128 experts, top_k 9"),
        ({"routing_method": "deepseek_v3", "top_k": 9, "scheme": "fp8_block", "act_format": "fp8"}, "moeq::route does"),
        ({"routing_method": "sigmoid", "num_experts": 256, "top_k": 8}, None),
        ({"routing_method": "renormalize", "num_experts": 2048, "top_k": 32}, None),
        ({"routing_method": "deepseek_v3", "num_experts": 1024, "top_k": 32}, None),
    ],
)
def test_explain_says_who_routes(change: dict[str, Any], text: str | None) -> None:
    notes = moe.explain(dataclasses.replace(PROBLEM, **change)).notes[TRTLLM]
    assert ("moeq::route" not in notes) if text is None else text in notes
